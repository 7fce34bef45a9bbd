//! The loopback interface, the only one that a guest has.

use std::io;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// `RTM_NEWLINK` (`linux/rtnetlink.h`).
const RTM_NEWLINK: u16 = 16;
/// `NLM_F_REQUEST | NLM_F_ACK` (`linux/netlink.h`).
const REQUEST_WITH_ACK: u16 = 1 | 4;
/// `NLMSG_ERROR`: the type of an acknowledgement.
const NLMSG_ERROR: u16 = 2;
/// The index of the loopback interface in every network namespace (`LOOPBACK_IFINDEX`).
pub(crate) const LOOPBACK_INDEX: i32 = 1;
/// `IFF_UP` (`linux/if.h`).
const IFF_UP: u32 = 1;
/// Length of `struct nlmsghdr` and of `struct ifinfomsg`.
const HEADER_BYTES: usize = 16;

/// Brings loopback up. The kernel then gives it 127.0.0.1/8 and ::1/128 by itself (`inetdev_event`,
/// `init_loopback`).
///
/// # Errors
/// That of the socket, or the one that the kernel's answer holds.
pub fn loopback_up() -> io::Result<()> {
    ask(&link_up_message())
}

/// Sends one request to the kernel (rtnetlink(7)) and waits for its acknowledgement.
///
/// # Errors
/// That of the socket, or the one that the kernel's answer holds.
pub(crate) fn ask(message: &[u8]) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // Protocol 0 of this family is NETLINK_ROUTE.
        None,
    )?;
    rustix::net::send(&socket, message, SendFlags::empty())?;
    let mut answer = [0; 256];
    let (received, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    acknowledgement(answer.get(..received).unwrap_or_default())
}

/// `RTM_NEWLINK` that sets `IFF_UP` on loopback: `struct nlmsghdr`, then `struct ifinfomsg` (rtnetlink(7)).
fn link_up_message() -> Vec<u8> {
    let mut message = Vec::with_capacity(2 * HEADER_BYTES);
    message.extend_from_slice(&32_u32.to_ne_bytes()); // nlmsg_len
    message.extend_from_slice(&RTM_NEWLINK.to_ne_bytes());
    message.extend_from_slice(&REQUEST_WITH_ACK.to_ne_bytes());
    message.extend_from_slice(&1_u32.to_ne_bytes()); // nlmsg_seq
    message.extend_from_slice(&0_u32.to_ne_bytes()); // nlmsg_pid
    message.extend_from_slice(&[0, 0, 0, 0]); // ifi_family, padding, ifi_type
    message.extend_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    message.extend_from_slice(&IFF_UP.to_ne_bytes()); // ifi_flags
    message.extend_from_slice(&IFF_UP.to_ne_bytes()); // ifi_change
    message
}

/// What an `NLMSG_ERROR` says: an error number, negated, or 0.
fn acknowledgement(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok());
    let code = answer
        .get(HEADER_BYTES..HEADER_BYTES + 4)
        .and_then(|bytes| bytes.try_into().ok());
    match (kind.map(u16::from_ne_bytes), code.map(i32::from_ne_bytes)) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_has_the_length_that_it_names() {
        let message = link_up_message();

        assert_eq!(message.len(), 32);
        assert_eq!(message[..4], 32_u32.to_ne_bytes());
        assert_eq!(message[20..24], 1_i32.to_ne_bytes());
    }

    #[test]
    fn an_answer_is_read_as_the_kernel_means_it() {
        let mut answer = vec![0; 36];
        answer[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        acknowledgement(&answer).unwrap();

        answer[16..20].copy_from_slice(&(-1_i32).to_ne_bytes());
        assert_eq!(
            acknowledgement(&answer).unwrap_err().raw_os_error(),
            Some(1)
        );

        assert!(acknowledgement(&answer[..10]).is_err());
        assert!(acknowledgement(&[]).is_err());
    }

    #[test]
    fn the_kernel_takes_the_message_or_says_who_may() {
        // Loopback is up on every machine that runs tests; without the right it is EPERM, not EINVAL.
        match loopback_up() {
            Ok(()) => {}
            Err(error) => assert_eq!(error.raw_os_error(), Some(1), "{error}"),
        }
    }
}
