//! Files that the host writes.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use protocol::file::{FileAnswer, FileOperation, FileRequest};
use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use protocol::message::StreamKind;

use crate::host::host;

#[test]
fn files_are_written_and_refused() {
    let mut host = host();
    let folder = tempfile::tempdir().unwrap();
    let spawn = host.spawn("true", &[]);
    let write = |path: &Path, user: Option<String>| {
        let request = FileRequest {
            path: path.as_os_str().as_bytes().to_vec(),
            user,
            operation: FileOperation::Write { mode: 0o640 },
        };
        let mut stream = host.dial(0, StreamKind::File(request));
        let _ = stream.write_all(b"\x07\0\0\0content\0\0\0\0");
        frame::read::<FileAnswer>(&mut stream, MAX_FROM_AGENT_BYTES)
            .unwrap()
            .result
    };

    write(&folder.path().join("a/b"), spawn.user.clone()).unwrap();
    assert_eq!(fs::read(folder.path().join("a/b")).unwrap(), b"content");
    assert!(
        write(&folder.path().join("c"), Some("no-such-user".into()))
            .unwrap_err()
            .message
            .contains("no-such-user")
    );
    write(&folder.path().join("a/b/c"), spawn.user).unwrap_err();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
