//! Which process has a socket: by its ports in `/proc/net/tcp`, then by its inode among all processes' descriptors
//! (proc(5)).

use std::fs::{self, File};
use std::io::Read;

use protocol::gate::Process;

/// Bytes of a table of sockets that are read: some ten thousand sockets.
const MAX_TABLE_BYTES: u64 = 2 << 20;

/// Descriptors of all processes together that are looked at. A guest with more is not told which process it was.
const MAX_DESCRIPTORS: usize = 4096;

/// Longest name that is told, in bytes; the kernel's are 15.
const MAX_NAME_BYTES: usize = 64;

/// The process whose socket is connected from `local_port` to `remote_port`.
pub(super) fn of_socket(local_port: u16, remote_port: u16) -> Option<Process> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    with_socket(tables, |local, remote| {
        local == local_port && remote == remote_port
    })
}

/// The process that sends datagrams from `local_port`, connected or not.
pub(super) fn of_datagrams(local_port: u16) -> Option<Process> {
    with_socket(["/proc/net/udp", "/proc/net/udp6"], |local, _| {
        local == local_port
    })
}

fn with_socket(tables: [&str; 2], is_it: impl Fn(u16, u16) -> bool) -> Option<Process> {
    let inode = tables.iter().find_map(|path| {
        let mut table = String::new();
        File::open(path)
            .ok()?
            .take(MAX_TABLE_BYTES)
            .read_to_string(&mut table)
            .ok()?;
        inode_in(&table, &is_it)
    })?;
    let wanted = format!("socket:[{inode}]");
    let mut looked_at = 0;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A process that ends meanwhile has no descriptors.
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            looked_at += 1;
            if looked_at > MAX_DESCRIPTORS {
                return None;
            }
            if fs::read_link(descriptor.path())
                .is_ok_and(|link| link.as_os_str() == wanted.as_str())
            {
                return Some(named(pid));
            }
        }
    }
    None
}

fn named(pid: u32) -> Process {
    let mut name = Vec::new();
    if let Ok(file) = File::open(format!("/proc/{pid}/comm")) {
        // One that has ended has no name.
        let _ = file.take(MAX_NAME_BYTES as u64).read_to_end(&mut name);
    }
    let name = String::from_utf8_lossy(&name).trim_end().to_owned();
    Process { pid, name }
}

/// The inode in a table of sockets whose ports are it; 0 is that of a socket that is closed already.
fn inode_in(table: &str, is_it: impl Fn(u16, u16) -> bool) -> Option<u64> {
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    table.lines().skip(1).find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, remote) = (words.next()?, words.next()?);
        if !is_it(port(local)?, port(remote)?) {
            return None;
        }
        let inode = words.nth(6)?.parse().ok()?;
        (inode != 0).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn a_socket_of_this_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();

        let found = of_socket(stream.local_addr().unwrap().port(), address.port()).unwrap();

        assert_eq!(found.pid, std::process::id());
        assert!(!found.name.is_empty());
    }

    #[test]
    fn a_socket_for_datagrams_is_found() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = of_datagrams(socket.local_addr().unwrap().port()).unwrap();
        assert_eq!(found.pid, std::process::id());
    }

    #[test]
    fn lines_that_are_none_are_skipped() {
        let table = "head\n garbage\n 0: 0100007F:01BB 0100007F:FFFF 01 0:0 0:0 0 0 0 77 1\n";
        let is = |port| move |local, remote| (local, remote) == (443, port);
        assert_eq!(inode_in(table, is(65535)), Some(77));
        assert_eq!(inode_in(table, is(1)), None);
        assert_eq!(inode_in("", is(1)), None);
    }
}
