//! The socket between a machine's process and its supervisor.
//!
//! It is a `SOCK_SEQPACKET` pair: one packet, one message, in postcard, with the descriptors that belong
//! to it attached (`SCM_RIGHTS`). The supervisor speaks first and says [`ToMachine::Start`]; when either
//! side closes, the machine is over: the socket's end is what ends a machine whose supervisor died.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Largest message in bytes; the longest is an end with its console tail.
pub const MAX_MESSAGE_BYTES: usize = 32 << 10;

/// Most descriptors in one message: `/dev/kvm`, state, memory, working set, console and the disks.
pub const MAX_DESCRIPTORS: usize = 5 + MAX_DISKS;

/// Most disks of a machine.
pub const MAX_DISKS: usize = 8;

/// Most bytes of the console's last output that come with the end of a machine.
pub const MAX_CONSOLE_TAIL_BYTES: usize = 8 << 10;

/// What the supervisor says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ToMachine {
    /// Build the machine and run it; first message, sent once. Descriptors, in this order: `/dev/kvm`, the
    /// kernel, the initramfs if [`MachineConfig::has_initramfs`], the console's sink if
    /// [`MachineConfig::has_console`], then one for each of [`MachineConfig::disks`].
    Start(MachineConfig),
    /// Open a vsock stream to a port in the guest. One descriptor: the machine's end of a
    /// `SOCK_STREAM` socket pair. If the guest refuses, that end is closed.
    Connect {
        /// Guest port.
        port: u32,
    },
    /// Go on from a snapshot; first message, sent once, in place of [`Self::Start`]. Descriptors, in this order: `/dev/kvm`, the
    /// state file, the memory file, the working set if [`RestoreConfig::has_working_set`], the console's sink if
    /// [`RestoreConfig::has_console`], then one for each of [`RestoreConfig::disks`].
    Restore(RestoreConfig),
    /// Take a snapshot, answered by [`FromMachine::SnapshotTaken`] or [`FromMachine::SnapshotFailed`]. Descriptors, in this order:
    /// `/dev/kvm`, a file for the state, empty, and one for the memory, as long as that is and without content; both regular
    /// files open for writing.
    Snapshot {
        /// What becomes of the machine.
        then: Then,
    },
}

/// What a machine does when its snapshot has been taken, or could not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Then {
    /// It runs on.
    Resume,
    /// Its processors stay where they are, for the supervisor to end it.
    Stay,
}

/// A machine to go on with from a snapshot. Memory, processors and their number are in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// Whether a descriptor is attached that gets all console output, as in [`MachineConfig::has_console`].
    pub has_console: bool,
    /// The disks that the machine had: as many, as large, and with the same access.
    pub disks: Vec<DiskConfig>,
    /// Whether the host's processor is to be compared with the snapshot's. A supervisor that has done so since the host booted
    /// spares its machines the question, which takes KVM a while.
    pub check_host: bool,
    /// Whether a descriptor is attached of a file that tells which pages the guest will write to at once
    /// ([`crate::snapshot::working_set`]).
    pub has_working_set: bool,
}

/// A machine to build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// Virtual processors, 1 to 32.
    pub vcpu_count: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Words for the kernel's command line, added to those that the machine itself needs.
    pub cmdline: String,
    /// The guest's vsock context identifier, 3 or more.
    pub guest_cid: u32,
    /// Fresh bytes from the supervisor's generator, for the kernel's own (boot protocol,
    /// `SETUP_RNG_SEED`).
    pub rng_seed: [u8; 32],
    /// Whether an initramfs is attached.
    pub has_initramfs: bool,
    /// Whether a descriptor is attached that gets all console output: a pipe or socket, written without
    /// blocking; what does not fit is dropped. Without it the kernel prints errors only.
    pub has_console: bool,
    /// Disks in order: the first is `/dev/vda`.
    pub disks: Vec<DiskConfig>,
}

/// A disk of the machine; its descriptor is a regular file or block device, opened as needed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// Whether the guest may only read.
    pub read_only: bool,
    /// What the guest reads as the disk's serial number, 20 bytes at most.
    pub serial: String,
}

/// What the machine says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FromMachine {
    /// The first vCPU is about to enter the guest.
    Running {
        /// `CLOCK_MONOTONIC` when the machine's `main` began, in nanoseconds.
        process_started_ns: u64,
        /// The same clock just before the first vCPU entered the guest.
        vcpu_running_ns: u64,
    },
    /// The guest opened a vsock stream to the host. One descriptor: the supervisor's end of it. To refuse
    /// it, close it.
    GuestConnected {
        /// Host port that the guest dialled.
        host_port: u32,
        /// Guest port that it dialled from.
        guest_port: u32,
    },
    /// The snapshot is in its files.
    SnapshotTaken(Taken),
    /// There is no snapshot, and the machine is as it was: a sentence that says why.
    SnapshotFailed(String),
    /// Last message: the machine has ended by itself.
    Ended {
        /// Why.
        reason: EndReason,
        /// The last bytes that the guest wrote to its console.
        console_tail: Vec<u8>,
    },
}

/// A snapshot that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Bytes of the state file.
    pub state_bytes: u64,
    /// Bytes of memory that are not zeros, in pages: what the memory file takes of its file system.
    pub memory_bytes: u64,
    /// How long the processors were kept out of the guest, in nanoseconds.
    pub paused_ns: u64,
}

/// Why a machine ended without its supervisor's asking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EndReason {
    /// The machine could not be built: a sentence that says what, and to what.
    StartFailed(String),
    /// The guest asked for a reset, as Linux does after a panic.
    Reset,
    /// A vCPU shut down: a triple fault.
    TripleFault,
    /// A vCPU can't go on: KVM could not emulate an instruction, or an entry failed.
    VcpuFailed(String),
    /// The machine's own process failed: host's fault, not the guest's.
    HostFailed(String),
}

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The other side does not read: nothing was sent.
    #[error("The other end of the control socket does not read")]
    Full,
    /// The other side has closed the socket, or is gone.
    #[error("The other end of the control socket is gone")]
    Closed,
    /// A packet that is too long, cut, or not a message of this protocol.
    #[error("A packet on the control socket is not a message of this protocol")]
    Malformed,
    /// The system call failed.
    #[error("The control socket failed")]
    Socket(#[source] io::Error),
}

/// One end of the control socket.
#[derive(Debug)]
pub struct ControlSocket(OwnedFd);

impl ControlSocket {
    /// Both ends of a new one, close-on-exec and blocking.
    ///
    /// # Errors
    /// When the process or the system is out of descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(ours), Self(theirs)))
    }

    /// Sends one message and its descriptors.
    ///
    /// # Errors
    /// See [`ControlError`]; [`ControlError::Malformed`] when the message or the list of descriptors is
    /// above its bound.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        self.send_with(message, descriptors, SendFlags::NOSIGNAL)
    }

    /// As [`Self::send`], but never waits for the other side to read.
    ///
    /// # Errors
    /// As [`Self::send`], and [`ControlError::Full`].
    pub fn try_send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        self.send_with(
            message,
            descriptors,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )
    }

    fn send_with<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), ControlError> {
        let packet = postcard::to_stdvec(message).map_err(|_| ControlError::Malformed)?;
        if packet.len() > MAX_MESSAGE_BYTES || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ControlError::Malformed);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let packet = [IoSlice::new(&packet)];
        match rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.0, &packet, &mut ancillary, flags)
        }) {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::AGAIN) => Err(ControlError::Full),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                Err(ControlError::Closed)
            }
            Err(error) => Err(ControlError::Socket(error.into())),
        }
    }

    /// Waits for one message and takes its descriptors, close-on-exec. There are none where this process may not have as many.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn receive<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), ControlError> {
        loop {
            if let Some(received) = self.receive_with(RecvFlags::CMSG_CLOEXEC)? {
                return Ok(received);
            }
        }
    }

    /// As [`Self::receive`], but never waits: `None` when there is no message.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn try_receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ControlError> {
        self.receive_with(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    }

    fn receive_with<T: DeserializeOwned>(
        &self,
        flags: RecvFlags,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ControlError> {
        let mut packet = vec![0; MAX_MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = match rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut packet)],
            &mut ancillary,
            flags,
        ) {
            Ok(received) => received,
            // The other side has closed with messages of ours unread. The system says so once, and before what the other side
            // had sent: its last message, which tells why, is still to come, or the end.
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET,
            ) => return Ok(None),
            Err(error) => return Err(ControlError::Socket(error.into())),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received.bytes == 0 {
            return Err(ControlError::Closed);
        }
        if received.flags.contains(ReturnFlags::TRUNC) || descriptors.len() > MAX_DESCRIPTORS {
            return Err(ControlError::Malformed);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // This process may have no more descriptors (unix(7)), for which the other side is not to blame: what was to come with them is
            // closed. Or there were too many.
            descriptors.clear();
        }
        let body = packet.get(..received.bytes).unwrap_or_default();
        let message = postcard::from_bytes(body).map_err(|_| ControlError::Malformed)?;
        Ok(Some((message, descriptors)))
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for ControlSocket {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl From<ControlSocket> for OwnedFd {
    fn from(socket: ControlSocket) -> Self {
        socket.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();

        supervisor
            .send(&ToMachine::Connect { port: 9 }, &[theirs.as_fd()])
            .unwrap();
        drop(theirs);
        let (message, mut descriptors) = machine.receive::<ToMachine>().unwrap();

        assert_eq!(message, ToMachine::Connect { port: 9 });
        let mut received = UnixStream::from(descriptors.remove(0));
        received.write_all(b"x").unwrap();
        let mut byte = [0];
        ours.read_exact(&mut byte).unwrap();
        assert_eq!((&byte, descriptors.len()), (b"x", 0));
    }

    #[test]
    fn a_closed_end_is_seen_by_both_calls() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        drop(supervisor);

        let sent = machine.send(&ToMachine::Connect { port: 9 }, &[]);
        let received = machine.receive::<ToMachine>();

        assert!(matches!(sent, Err(ControlError::Closed)));
        assert!(matches!(received, Err(ControlError::Closed)));
    }

    #[test]
    fn the_last_message_is_heard_though_ours_was_not() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        let last = FromMachine::Ended {
            reason: EndReason::Reset,
            console_tail: Vec::new(),
        };
        supervisor
            .send(&ToMachine::Connect { port: 9 }, &[])
            .unwrap();
        machine.send(&last, &[]).unwrap();
        drop(machine);

        let (received, _) = supervisor.receive::<FromMachine>().unwrap();

        assert_eq!(received, last);
        assert!(matches!(
            supervisor.receive::<FromMachine>(),
            Err(ControlError::Closed)
        ));
    }

    #[test]
    fn a_reader_that_does_not_read_is_not_waited_for() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        let message = ToMachine::Connect { port: 9 };

        let sent = (0..100_000)
            .map(|_| machine.try_send(&message, &[]))
            .take_while(Result::is_ok)
            .count();

        assert!(matches!(
            machine.try_send(&message, &[]),
            Err(ControlError::Full)
        ));
        for _ in 0..sent {
            supervisor.receive::<ToMachine>().unwrap();
        }
        assert!(supervisor.try_receive::<ToMachine>().unwrap().is_none());
    }

    #[test]
    fn bytes_that_are_no_message_are_malformed() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        rustix::net::send(&supervisor, &[0xff; 64], SendFlags::empty()).unwrap();

        assert!(matches!(
            machine.receive::<ToMachine>(),
            Err(ControlError::Malformed)
        ));
    }

    #[test]
    fn a_descriptor_more_than_there_may_be_is_malformed() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        let packet = postcard::to_stdvec(&ToMachine::Connect { port: 9 }).unwrap();
        let descriptors = [supervisor.as_fd(); MAX_DESCRIPTORS + 1];
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        rustix::net::sendmsg(
            &supervisor,
            &[IoSlice::new(&packet)],
            &mut ancillary,
            SendFlags::empty(),
        )
        .unwrap();

        assert!(matches!(
            machine.receive::<ToMachine>(),
            Err(ControlError::Malformed)
        ));
    }

    #[test]
    fn a_packet_above_the_bound_is_malformed() {
        let (supervisor, machine) = ControlSocket::pair().unwrap();
        rustix::net::send(
            &supervisor,
            &vec![0; MAX_MESSAGE_BYTES + 1],
            SendFlags::empty(),
        )
        .unwrap();

        assert!(matches!(
            machine.receive::<ToMachine>(),
            Err(ControlError::Malformed)
        ));
    }
}
