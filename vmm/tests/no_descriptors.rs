//! A process that may have no more descriptors. Alone in its program: the limit is the whole process's.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sandvmm_vmm::control::{ControlSocket, ToMachine};

#[test]
fn a_message_comes_without_the_descriptors_that_there_is_no_room_for() {
    let (supervisor, machine) = ControlSocket::pair().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let limit = getrlimit(Resource::Nofile);
    for port in [1, 2] {
        supervisor
            .send(&ToMachine::Connect { port }, &[theirs.as_fd()])
            .unwrap();
    }
    drop(theirs);
    let none = Rlimit {
        current: Some(0),
        ..limit
    };

    setrlimit(Resource::Nofile, none).unwrap();
    let without = machine.receive::<ToMachine>();
    setrlimit(Resource::Nofile, limit).unwrap();
    let with = machine.receive::<ToMachine>();

    let (message, descriptors) = without.unwrap();
    assert_eq!(
        (message, descriptors.len()),
        (ToMachine::Connect { port: 1 }, 0)
    );
    let (message, descriptors) = with.unwrap();
    assert_eq!(
        (message, descriptors.len()),
        (ToMachine::Connect { port: 2 }, 1)
    );
    drop(ours);
}
