//! Target `control`: packets with descriptors on a machine's control socket, up to where KVM would be asked for a machine.
//!
//! Checked: the machine's process comes to an end by itself, says why where it was asked to start, within the bounds of a message; and
//! every descriptor that it was sent is closed.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType, sendmsg, shutdown, socketpair,
};
use vmm::Served;
use vmm::control::{
    ControlSocket, DiskConfig, EndReason, FromMachine, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES,
    MachineConfig, RestoreConfig, Then, ToMachine,
};

use crate::input::Input;

/// The most packets of one input: fewer than a socket holds without a reader.
const PACKETS_MAX: usize = 4;

/// The most descriptors in a packet: two more than there may be.
const DESCRIPTORS_MAX: usize = MAX_DESCRIPTORS + 2;

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("descriptors");
    // Whoever holds no copy of the write end any more is seen at the read end. As `/dev/kvm` it does not answer.
    let (read_end, write_end) = rustix::pipe::pipe().expect("descriptors");
    let mut is_start = None;
    for _ in 0..PACKETS_MAX {
        if input.is_empty() {
            break;
        }
        let (count, length) = (usize::from(input.u8()), usize::from(input.u16()));
        let descriptors = vec![write_end.as_fd(); count % (DESCRIPTORS_MAX + 1)];
        let packet = input.bytes(length % (MAX_MESSAGE_BYTES + 2));
        send(&ours, packet, &descriptors);
        is_start.get_or_insert_with(|| {
            descriptors.len() <= MAX_DESCRIPTORS
                && packet.len() <= MAX_MESSAGE_BYTES
                && matches!(
                    postcard::from_bytes(packet),
                    Ok(ToMachine::Start(_) | ToMachine::Restore(_))
                )
        });
    }
    drop(write_end);
    shutdown(&ours, Shutdown::Write).expect("a socket");

    let served = vmm::serve(ControlSocket::from(theirs));

    if is_start == Some(true) {
        assert_eq!(served, Served::Ended);
        let (message, descriptors) = ControlSocket::from(ours)
            .receive::<FromMachine>()
            .expect("the machine says why it did not start");
        assert!(descriptors.is_empty());
        match message {
            FromMachine::Ended {
                reason: EndReason::StartFailed(sentence),
                console_tail,
            } => assert!(!sentence.is_empty() && console_tail.is_empty()),
            other => panic!("there can be no machine without KVM: {other:?}"),
        }
    } else {
        assert_eq!(served, Served::NoStart);
    }
    assert!(is_closed(&read_end), "a descriptor leaks");
}

fn send(socket: &OwnedFd, packet: &[u8], descriptors: &[std::os::fd::BorrowedFd<'_>]) {
    let mut space =
        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    sendmsg(
        socket,
        &[std::io::IoSlice::new(packet)],
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
    .expect("the socket has room");
}

/// Whether nobody holds the write end of this pipe.
fn is_closed(read_end: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(read_end, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut polled, Some(&now)).expect("a pipe");
    polled[0].revents().contains(PollFlags::HUP)
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let config = MachineConfig {
        vcpu_count: 1,
        memory_mib: 64,
        cmdline: "quiet".into(),
        guest_cid: 3,
        rng_seed: [1; 32],
        has_initramfs: true,
        has_console: true,
        disks: vec![DiskConfig {
            read_only: true,
            serial: "root".into(),
        }],
    };
    let restore = RestoreConfig {
        has_console: true,
        disks: config.disks.clone(),
        check_host: true,
        has_working_set: false,
    };
    let plain = MachineConfig {
        has_initramfs: false,
        has_console: false,
        disks: Vec::new(),
        ..config.clone()
    };
    let no_processor = MachineConfig {
        vcpu_count: 0,
        ..plain.clone()
    };
    let too_many_disks = MachineConfig {
        disks: vec![config.disks[0].clone(); 9],
        ..plain.clone()
    };
    let packet = |count: u8, message: &ToMachine| {
        let bytes = postcard::to_stdvec(message).expect("short");
        let length = u16::try_from(bytes.len()).expect("short").to_le_bytes();
        [&[count], length.as_slice(), &bytes].concat()
    };
    let connect = ToMachine::Connect { port: 2 };
    vec![
        ("start", packet(5, &ToMachine::Start(config.clone()))),
        ("plain_start", packet(2, &ToMachine::Start(plain.clone()))),
        (
            "start_lacking_descriptors",
            packet(4, &ToMachine::Start(config)),
        ),
        ("no_processor", packet(2, &ToMachine::Start(no_processor))),
        (
            "too_many_disks",
            packet(11, &ToMachine::Start(too_many_disks)),
        ),
        ("restore", packet(5, &ToMachine::Restore(restore.clone()))),
        (
            "restore_lacking_descriptors",
            packet(4, &ToMachine::Restore(restore)),
        ),
        (
            "snapshot_first",
            packet(3, &ToMachine::Snapshot { then: Then::Stay }),
        ),
        ("connect_first", packet(1, &connect)),
        (
            "start_and_connect",
            [packet(2, &ToMachine::Start(plain)), packet(1, &connect)].concat(),
        ),
        ("too_many_descriptors", packet(14, &connect)),
        ("nothing", Vec::new()),
    ]
}
