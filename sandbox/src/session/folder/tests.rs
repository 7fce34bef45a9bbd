use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::name::MAX_NAME_BYTES;

fn info(name: &str) -> SessionInfo {
    SessionInfo {
        name: name.into(),
        pid: 7,
        ..SessionInfo::default()
    }
}

fn private() -> tempfile::TempDir {
    tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir()
        .unwrap()
}

fn is_alive(root: &Path, name: &str) -> bool {
    matches!(look(root, name).unwrap(), Found::Alive(_))
}

#[test]
fn names_that_lead_elsewhere_are_none() {
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    for name in ["", ".", "..", ".x", "-x", "a/b", "a\0", "ä", "a:b", &long] {
        let error = path(Path::new("/f"), name).unwrap_err();
        assert!(matches!(error, SessionError::Name { .. }), "{name}");
    }
    assert_eq!(
        path(Path::new("/f"), "a.b_C-1").unwrap(),
        Path::new("/f/a.b_C-1")
    );
}

#[test]
fn of_many_that_claim_one_name_one_gets_it() {
    let base = private();
    let root = base.path().join("sessions");

    let claimed: Vec<_> = thread::scope(|scope| {
        let claims: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| claim(&root, &info("dev"))))
            .collect();
        claims.into_iter().map(|one| one.join().unwrap()).collect()
    });

    assert_eq!(claimed.iter().filter(|one| one.is_ok()).count(), 1);
    for refused in claimed.iter().filter_map(|one| one.as_ref().err()) {
        assert!(matches!(refused, SessionError::Exists { .. }), "{refused}");
    }
    assert!(is_alive(&root, "dev"));
    drop(claimed);
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
}

#[test]
fn a_name_goes_from_hand_to_hand_and_is_never_had_twice() {
    let base = private();
    let root = base.path().join("sessions");
    let had = std::sync::atomic::AtomicU32::new(0);

    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let Ok(claimed) = claim(&root, &info("dev")) else {
                        continue;
                    };
                    let before = had.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    assert_eq!(before, 0);
                    had.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    drop(claimed);
                    look(&root, "dev").unwrap();
                }
            });
        }
    });

    look(&root, "dev").unwrap();
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
}

#[test]
fn what_a_killed_supervisor_left_is_swept() {
    let base = private();
    let root = base.path().join("sessions");
    let claimed = claim(&root, &info("dev")).unwrap();
    let listener = claimed.listen().unwrap();
    log::read(&claimed.path, None).unwrap();
    assert!(is_alive(&root, "dev"));
    // As the system does it: the lock goes, all else stays.
    let Claimed { lock, .. } = &claimed;
    lock.unlock().unwrap();
    std::mem::forget(claimed);
    drop(listener);

    assert!(!is_alive(&root, "dev"));

    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
}

#[test]
fn what_is_no_session_is_not_listed_and_an_empty_folder_is_swept() {
    let base = private();
    let root = base.path().join("sessions");
    let claimed = claim(&root, &info("dev")).unwrap();
    fs::write(root.join("note"), "no folder").unwrap();
    fs::create_dir(root.join("empty")).unwrap();

    assert_eq!(names(&root).unwrap(), ["dev", "empty"]);
    assert!(!is_alive(&root, "empty"));

    assert_eq!(names(&root).unwrap(), ["dev"]);
    drop(claimed);
}

#[test]
fn a_folder_that_others_may_change_is_not_looked_into() {
    let base = private();
    let root = base.path().join("sessions");
    let claimed = claim(&root, &info("dev")).unwrap();

    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();

    let looked = look(&root, "dev");
    assert!(matches!(looked, Err(SessionError::NotPrivate { .. })));
    let listed = names(&root);
    assert!(matches!(listed, Err(SessionError::NotPrivate { .. })));
    drop(claimed);
}

#[test]
fn who_listens_is_known_by_the_kernel_and_must_be_this_user() {
    let base = private();
    let root = base.path().join("sessions");
    // What is on record is another process's number.
    let claimed = claim(&root, &info("dev")).unwrap();
    let Found::Alive(found) = look(&root, "dev").unwrap() else {
        panic!("it is held");
    };
    assert_eq!(found.supervisor(), Pid::from_raw(7));
    let _listener = claimed.listen().unwrap();

    let stream = found.connect().unwrap();

    let uid = rustix::process::geteuid().as_raw();
    let own = rustix::process::getpid();
    assert_eq!(found.supervisor(), Some(own));
    assert_eq!(listener(&stream, uid).unwrap(), own);
    let refused = listener(&stream, uid + 1).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn a_session_stays_young_and_knows_when_its_folder_is_gone() {
    let base = private();
    let root = base.path().join("sessions");
    let claimed = claim(&root, &info("dev")).unwrap();
    let _listener = claimed.listen().unwrap();
    let old = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    let old = Timestamps {
        last_access: old,
        last_modification: old,
    };
    let paths = [&root, &claimed.path.join(LOCK), &claimed.path.join(SOCKET)];
    for path in paths {
        utimensat(CWD, path, &old, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }

    assert!(claimed.refresh());

    for path in paths {
        let found = fs::symlink_metadata(path).unwrap();
        assert!(found.mtime() > 1 && found.atime() > 1, "{path:?}");
    }
    fs::remove_dir_all(&claimed.path).unwrap();
    assert!(!claimed.refresh());
}

#[test]
fn a_record_that_has_less_is_read() {
    let base = private();
    fs::write(base.path().join(RECORD), r#"{"pid": 7, "more": 1}"#).unwrap();

    assert_eq!(read_record(base.path()).unwrap().pid, 7);
}

#[test]
fn a_session_is_reached_however_long_its_path_is() {
    let base = private();
    let root = base.path().join("x".repeat(150));
    let claimed = claim(&root, &info("dev")).unwrap();
    let Found::Alive(before) = look(&root, "dev").unwrap() else {
        panic!("it is held");
    };
    assert!(!before.info.is_ready && before.info.pid == 7 && before.is_held());

    let listener = claimed.listen().unwrap();
    let Found::Alive(found) = look(&root, "dev").unwrap() else {
        panic!("it is held");
    };
    let client = found.connect().unwrap();

    listener.accept().unwrap();
    assert!(found.info.is_ready);
    assert!(!found.wait_gone(Duration::ZERO).unwrap());
    drop((client, claimed));
    assert!(found.wait_gone(Duration::ZERO).unwrap());
}

#[test]
fn a_folder_that_others_may_look_into_is_refused() {
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();

    let refused = claim(&base.path().join("sessions"), &info("dev"));

    assert!(matches!(refused, Err(SessionError::NotPrivate { .. })));
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}
