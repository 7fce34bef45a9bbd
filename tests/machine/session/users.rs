//! Whose a session is.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use sandvmm_tests::{HUNG_AFTER, Nobodys};

use super::Sessions;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn nobody_else_is_served() {
    let sessions = Sessions::dev(&[]);
    let output = Nobodys::copied()
        .command()
        .args(["exec", "dev", "--", "true"])
        .env("XDG_RUNTIME_DIR", sessions.0.path())
        .output()
        .unwrap();
    // Somebody else's runtime folder is none.
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("There is no session \"dev\""), "{said}");

    // Only who the client is keeps it out now.
    let folder = sessions.0.path();
    let inner = folder.join("sandvmm/sessions/dev");
    let walls = [
        folder,
        &folder.join("sandvmm"),
        &folder.join("sandvmm/sessions"),
        &inner,
        &inner.join("socket"),
    ];
    let change = |mode| {
        for wall in walls {
            std::fs::set_permissions(wall, PermissionsExt::from_mode(mode)).unwrap();
        }
    };
    change(0o777);
    let served = as_user(Nobodys::ID, || {
        let mut stream = UnixStream::connect(inner.join("socket")).unwrap();
        stream.set_read_timeout(Some(HUNG_AFTER)).unwrap();
        // It may be closed before all is written.
        let _ = stream.write_all(&[0xff; 64]);
        std::io::Read::read(&mut stream, &mut [0; 4])
    });
    change(0o700);
    match served {
        Ok(count) => assert_eq!(count, 0, "it is answered"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    sessions.exec(&["true"]).done().expect(0);
}

/// On a thread that is another user's.
fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let uid = Uid::from_raw(uid);
            set_thread_res_uid(uid, uid, uid).unwrap();
            work()
        });
        worker.join().unwrap()
    })
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_supervisor_of_another_user_is_not_talked_to() {
    const SOMEBODY: u32 = 1234;
    let sessions = Sessions::new();
    let inner = sessions.0.path().join("sandvmm/sessions/dev");
    std::fs::create_dir_all(&inner).unwrap();
    let change = |mode| {
        for folder in inner.ancestors().take(4) {
            std::fs::set_permissions(folder, PermissionsExt::from_mode(mode)).unwrap();
        }
    };
    let lock = std::fs::File::create(inner.join("lock")).unwrap();
    lock.lock().unwrap();
    change(0o777);
    let listener = as_user(SOMEBODY, || {
        UnixListener::bind(inner.join("socket")).unwrap()
    });
    change(0o700);

    let refused = sessions.call(["ps", "dev"]).done().expect(125);

    assert!(
        refused.stderr.contains("another user's process"),
        "{refused:?}"
    );
    drop((listener, lock));
}
