//! What a MiB costs that leaves a sandbox, or comes back: the guest, the machine's process, the library's relay, the host's kernel and a
//! server on the host's loopback, together.

use super::MACHINE;
use crate::packages::Need;

/// The server's interpreter.
pub(super) const NEED: Need = Need::new("python3", "python3");

/// MiB of one transfer. The first bytes of a connection are cheaper, and dearer, than those that follow.
const TRANSFER_MIB: u32 = 16;

/// Where the server listens, and its name.
const PORT: u16 = 9000;
const NAME: &str = "server.test";

/// The server: takes a transfer, says so, gives one.
const SERVER: &str = "
import socket, sys
size = int(sys.argv[2]) << 20
piece, buffer = bytes(1 << 18), memoryview(bytearray(1 << 18))
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
while True:
    with listener.accept()[0] as stream:
        left = size
        while left:
            left -= stream.recv_into(buffer, min(left, len(piece)))
        stream.sendall(b'!')
        if stream.recv(1):
            for _ in range(size // len(piece)):
                stream.sendall(piece)
";

/// The guest's program: a report as that of `sandvmm bench`, of one MiB each way.
const CLIENT: &str = "
import json, socket, sys, time
host, port, mib, runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
size, piece, taken = mib << 20, bytes(1 << 18), {'a MiB out': [], 'a MiB in': []}
buffer = memoryview(bytearray(1 << 18))
for _ in range(runs):
    with socket.create_connection((host, port)) as stream:
        began = time.monotonic_ns()
        for _ in range(size // len(piece)):
            stream.sendall(piece)
        stream.recv(1)
        turned = time.monotonic_ns()
        stream.sendall(b'!')
        left = size
        while left:
            left -= stream.recv_into(buffer)
        taken['a MiB out'].append((turned - began) // 1000 // mib)
        taken['a MiB in'].append((time.monotonic_ns() - turned) // 1000 // mib)
def summary(figures):
    figures.sort()
    return {'min': figures[0], 'p50': figures[len(figures) // 2], 'max': figures[-1]}
print(json.dumps({'runs': runs, 'phases': [
    {'name': name, 'reached_us': None, 'took_us': summary(figures)} for name, figures in taken.items()]}))
";

/// A command for the emulated host, whose hosts file is its own: so many transfers each way, and an object of JSON.
pub(super) fn command(runs: u32) -> String {
    let machine = MACHINE.join(" ");
    format!(
        "echo 127.0.0.1 {NAME} >> /etc/hosts
         python3 -I -S -c \"{SERVER}\" {PORT} {TRANSFER_MIB} &
         server=$!
         while ! grep -q :{PORT:04X} /proc/net/tcp; do kill -0 $server || exit; sleep 0.1; done
         sandvmm run --cold {machine} --timeout 300s --allow-host {NAME}:{PORT} --allow-host 127.0.0.1:{PORT} --raw-port {PORT} \\
             -c \"{CLIENT}\" {NAME} {PORT} {TRANSFER_MIB} {runs}
         ended=$?
         kill $server
         exit $ended"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_stand_in_the_shells_quotes() {
        assert!(![SERVER, CLIENT].concat().contains(['"', '$', '`', '\\']));
    }
}
