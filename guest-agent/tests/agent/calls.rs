//! Calls of the host's functions.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use protocol::call::{Answer, FromBridge, MAX_FRAME_BYTES};
use protocol::frame;
use protocol::message::StreamKind;

use crate::host::{Host, PATIENCE, host};

#[test]
fn calls_are_carried_over_the_newest_stream() {
    let host = host();
    let ready = |host: &Host| {
        let mut stream = host.dial(0, StreamKind::Calls);
        let first: FromBridge = frame::read(&mut stream, MAX_FRAME_BYTES).unwrap();
        assert_eq!(first, FromBridge::Ready);
        stream
    };
    let mut former = ready(&host);
    let mut stream = ready(&host);
    let socket = host.address.parent().unwrap().join("calls/host.sock");

    let mut program = UnixStream::connect(socket).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    program.write_all(b"a call\n").unwrap();
    let call: FromBridge = frame::read(&mut stream, MAX_FRAME_BYTES).unwrap();
    let FromBridge::Call { id, line } = call else {
        panic!("{call:?}");
    };
    let answer = Answer {
        id,
        line: b"an answer".to_vec(),
    };
    frame::write(&mut stream, &answer, MAX_FRAME_BYTES).unwrap();
    let mut heard = [0; 10];
    program.read_exact(&mut heard).unwrap();

    assert_eq!((line.as_slice(), &heard), (&b"a call"[..], b"an answer\n"));
    // The former one's bridge was ended.
    assert_eq!(former.read(&mut [0]).unwrap(), 0);
    drop(stream);
    let mut rest = Vec::new();
    program.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"");
}
