//! What the new process tells its supervisor before it serves: one packet on a socket of their own, which it then
//! closes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::cell::Settings;
use crate::ids::{Got, Whose};

/// Length of every packet.
pub(crate) const PACKET_BYTES: usize = 20;

/// Most bytes of a supervisor's settings: six numbers.
const MAX_SETTINGS_BYTES: usize = 128;

/// First byte of a packet of a process that could not execute its program.
pub(crate) const FAILED: u8 = 1;

/// First byte of a packet of a process that is in its cell.
const ENTERED: u8 = 2;

/// The descriptor that the new process finds its end of the socket at.
pub(crate) const DESCRIPTOR: i32 = 3;

/// The steps between the process's first instruction and its program's, by number.
const STEPS: [&str; 8] = [
    "following its supervisor's end",
    "hearing its supervisor",
    "taking its ids",
    "making a session",
    "laying out its descriptors",
    "clearing its signals",
    "executing the program",
    "leaving its supervisor's priorities",
];

/// What came on the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// A step failed with an error number.
    Failed(&'static str, i32),
    /// The process is in its cell.
    Entered(Entered),
}

/// What the process did, of that which its supervisor can't know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    /// 0 where its root is empty, an error number where the host refused it, -1 where it was not to be.
    pub(crate) root_errno: i32,
    /// 0 for none.
    pub(crate) landlock_abi: u32,
    /// Whose ids it took, where it was to take its own.
    pub(crate) got: Option<Got>,
    /// Whether it is in other groups than its own.
    pub(crate) has_groups: bool,
    /// Whether there are capabilities in its bounding set.
    pub(crate) keeps_bounding_set: bool,
    /// Whether its secure bits could not be set.
    pub(crate) lacks_secure_bits: bool,
    /// 0 where its session keyring is its own, or there are no keys; else an error number.
    pub(crate) keyring_errno: u8,
}

/// Of the flags in a packet.
const HAS_GROUPS: u8 = 1;
const KEEPS_BOUNDING_SET: u8 = 2;
const LACKS_SECURE_BITS: u8 = 4;

/// Whose an id is, in a packet; 0 where none was to be taken.
const WHOSE: [Whose; 3] = [Whose::Supervisors, Whose::Nobodys, Whose::Own];

fn whose_to_byte(whose: Option<Whose>) -> u8 {
    whose.map_or(0, |whose| whose as u8 + 1)
}

fn whose_of_byte(byte: u8) -> Option<Whose> {
    WHOSE.get(usize::from(byte).checked_sub(1)?).copied()
}

/// Both ends of the socket: packets, so that one is never read in parts.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Lets a process that was made begin, and leaves on the socket what it will ask for once its program runs.
pub(crate) fn begin(socket: BorrowedFd<'_>, settings: Settings) -> io::Result<()> {
    rustix::net::send(socket, &[0], SendFlags::NOSIGNAL)?;
    rustix::net::send(socket, settings.to_words().as_bytes(), SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What the supervisor left, or is about to: it lets the process begin first. A supervisor that is gone ends the wait.
pub(crate) fn settings(socket: BorrowedFd<'_>) -> io::Result<Settings> {
    let mut words = [0; MAX_SETTINGS_BYTES];
    let (count, _) = rustix::net::recv(socket, words.as_mut_slice(), RecvFlags::empty())?;
    words
        .get(..count)
        .and_then(|words| std::str::from_utf8(words).ok())
        .and_then(Settings::from_words)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Says that this process is in its cell.
pub(crate) fn entered(socket: BorrowedFd<'_>, entered: Entered) -> io::Result<()> {
    let mut packet = [0; PACKET_BYTES];
    let [tag, user, group, flags, rest @ ..] = &mut packet;
    *tag = ENTERED;
    *user = whose_to_byte(entered.got.map(|got| got.user));
    *group = whose_to_byte(entered.got.map(|got| got.group));
    *flags = HAS_GROUPS * u8::from(entered.has_groups)
        + KEEPS_BOUNDING_SET * u8::from(entered.keeps_bounding_set)
        + LACKS_SECURE_BITS * u8::from(entered.lacks_secure_bits);
    let (root, rest) = rest.split_at_mut(4);
    let (landlock, rest) = rest.split_at_mut(4);
    let (ids, rest) = rest.split_at_mut(4);
    root.copy_from_slice(&entered.root_errno.to_le_bytes());
    landlock.copy_from_slice(&entered.landlock_abi.to_le_bytes());
    ids.copy_from_slice(&entered.got.map_or(0, |got| got.errno).to_le_bytes());
    if let [keyring, ..] = rest {
        *keyring = entered.keyring_errno;
    }
    rustix::net::send(socket, &packet, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits at most `limit` for what the process has to say: `Ok(None)` where it ended without a word, an error of
/// the kind [`io::ErrorKind::TimedOut`] where it said nothing.
pub(crate) fn receive(socket: impl AsFd, limit: Duration) -> io::Result<Option<Report>> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut descriptors = [PollFd::new(&socket, PollFlags::IN)];
        match poll(&mut descriptors, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut packet = [0; PACKET_BYTES];
    let read = match rustix::io::read(&socket, &mut packet) {
        // It ended before it had read its settings. Linux tells that once and first, and has what was said all the same.
        Err(Errno::CONNRESET) => rustix::io::read(&socket, &mut packet),
        read => read,
    };
    match read {
        Ok(PACKET_BYTES) => parse(&packet)
            .map(Some)
            .ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Ok(0) => Ok(None),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(error) => Err(error.into()),
    }
}

fn parse(packet: &[u8; PACKET_BYTES]) -> Option<Report> {
    let [
        tag,
        first,
        second,
        third,
        a,
        b,
        c,
        d,
        e,
        f,
        g,
        h,
        i,
        j,
        k,
        l,
        m,
        ..,
    ] = *packet;
    let number = i32::from_le_bytes([a, b, c, d]);
    match tag {
        FAILED => Some(Report::Failed(STEPS.get(usize::from(first))?, number)),
        ENTERED => Some(Report::Entered(Entered {
            root_errno: number,
            landlock_abi: u32::from_le_bytes([e, f, g, h]),
            got: whose_of_byte(first)
                .zip(whose_of_byte(second))
                .map(|(user, group)| Got {
                    user,
                    group,
                    errno: i32::from_le_bytes([i, j, k, l]),
                }),
            has_groups: third & HAS_GROUPS != 0,
            keeps_bounding_set: third & KEEPS_BOUNDING_SET != 0,
            lacks_secure_bits: third & LACKS_SECURE_BITS != 0,
            keyring_errno: m,
        })),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn failure(step: u8) -> [u8; PACKET_BYTES] {
        let mut packet = [0; PACKET_BYTES];
        (packet[0], packet[1], packet[4]) = (FAILED, step, 13);
        packet
    }

    #[test]
    fn an_entry_is_read_as_it_was_said() {
        let (ours, theirs) = pair().unwrap();
        let got = Some(Got {
            user: Whose::Own,
            group: Whose::Supervisors,
            errno: 22,
        });
        for (got, has_groups) in [(got, false), (None, true)] {
            let said = Entered {
                root_errno: -1,
                landlock_abi: 7,
                got,
                has_groups,
                keeps_bounding_set: !has_groups,
                lacks_secure_bits: has_groups,
                keyring_errno: 122,
            };

            entered(theirs.as_fd(), said).unwrap();

            assert_eq!(receive(&ours, SOON).unwrap(), Some(Report::Entered(said)));
        }
    }

    #[test]
    fn settings_that_come_late_are_waited_for_and_an_end_is_not() {
        let (ours, theirs) = pair().unwrap();
        let waiting = std::thread::spawn(move || {
            let first = settings(theirs.as_fd()).map(Settings::to_words);
            (first, settings(theirs.as_fd()))
        });
        std::thread::sleep(Duration::from_millis(50));
        let sent = "0:0:1000:128:1:512";
        rustix::net::send(&ours, sent.as_bytes(), SendFlags::NOSIGNAL).unwrap();
        drop(ours);

        let (first, second) = waiting.join().unwrap();

        assert_eq!(first.unwrap(), sent);
        second.unwrap_err();
    }

    #[test]
    fn a_failure_names_its_step_and_a_step_that_does_not_exist_is_invalid() {
        let failed = |step| parse(&failure(step));

        assert_eq!(failed(6), Some(Report::Failed("executing the program", 13)));
        assert_eq!(failed(8), None);
        assert_eq!(parse(&[0; PACKET_BYTES]), None);
    }

    #[test]
    fn what_was_said_is_heard_of_a_process_that_ended_without_its_settings() {
        let (ours, theirs) = pair().unwrap();
        let (silent, ended) = pair().unwrap();
        for socket in [&ours, &silent] {
            rustix::net::send(socket, b"0:0:1000:128:1:512", SendFlags::NOSIGNAL).unwrap();
        }
        let said = failure(7);
        rustix::net::send(&theirs, &said, SendFlags::NOSIGNAL).unwrap();
        drop((theirs, ended));

        assert_eq!(receive(&ours, SOON).unwrap(), parse(&said));
        assert_eq!(receive(&silent, SOON).unwrap(), None);
    }

    #[test]
    fn an_end_and_a_silence_are_told_apart() {
        let (ours, theirs) = pair().unwrap();

        let silent = receive(&ours, Duration::from_millis(1)).unwrap_err();
        drop(theirs);

        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        assert_eq!(receive(&ours, SOON).unwrap(), None);
    }
}
