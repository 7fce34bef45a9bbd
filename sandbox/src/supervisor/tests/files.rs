//! Files, against an agent that was taken over: what it says may reach nothing on the host.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use protocol::content::{self, ContentReader};
use protocol::file::{
    FileAnswer, FileDone, FileFailure, FileFailureKind, FileKind, FileMetadata, FileOperation,
    FolderItem, TreeItem, TreeNode, WatchItem, WatchedChange,
};

use super::*;
use crate::error::FileError;
use crate::{ChangeKind, CopyLimits};

/// Runs `ask`, and has the guest read the request and do `lie`.
fn with_guest<T: Send>(
    ask: impl FnOnce(&Sandbox) -> T + Send,
    lie: impl FnOnce(&mut UnixStream, StreamHeader),
) -> T {
    let (sandbox, peer, _agent) = ready_sandbox(None);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&sandbox));
        let (mut stream, header) = peer.accept();
        lie(&mut stream, header);
        drop(stream);
        asking.join().unwrap()
    })
}

fn answer(stream: &mut UnixStream, result: Result<FileDone, FileFailure>) {
    frame::write(stream, &FileAnswer { result }, MAX_FROM_AGENT_BYTES).unwrap();
}

fn tell<T: serde::Serialize>(stream: &mut UnixStream, message: &T) {
    // A host that has heard enough is gone.
    let _ = frame::write(stream, message, MAX_FROM_AGENT_BYTES);
}

fn tell_content(stream: &mut UnixStream, bytes: &[u8]) {
    for piece in bytes.chunks(content::MAX_PIECE_BYTES).chain([&[][..]]) {
        let _ = stream.write_all(&content::header(piece.len()));
        let _ = stream.write_all(piece);
    }
}

/// Whose the guest says that all is.
const OWNER: (u32, u32) = (4321, 1234);

/// A file that is empty, or says so.
const FILE: TreeNode = TreeNode::File { bytes: 0 };

fn entry(path: &[u8], node: TreeNode, mode: u32) -> TreeItem {
    TreeItem::Entry {
        path: path.to_vec(),
        node,
        mode,
        uid: OWNER.0,
        gid: OWNER.1,
        modified_ns: 1_500_000_000_500_000_000,
    }
}

/// Copies out to `to` what the guest sends after its answer.
fn copy_out(
    to: &Path,
    limits: CopyLimits,
    send: impl FnOnce(&mut UnixStream),
) -> Result<crate::CopiedOut, FileError> {
    with_guest(
        |sandbox| sandbox.files().copy_out("x", to, limits),
        |stream, _| {
            answer(stream, Ok(FileDone::At(b"/x".to_vec())));
            send(stream);
        },
    )
}

#[test]
fn a_file_is_streamed_and_its_place_comes_back() {
    let content = vec![b'f'; 3 << 20];
    let mut received = Vec::new();
    let mut asked = None;

    let written = with_guest(
        |sandbox| sandbox.files().mode(0o640).write("a/b", content.as_slice()),
        |stream, header| {
            ContentReader::new(&mut *stream)
                .read_to_end(&mut received)
                .unwrap();
            answer(stream, Ok(FileDone::At(b"/home/u/a/b".to_vec())));
            asked = Some(header.kind);
        },
    );

    let Some(StreamKind::File(request)) = asked else {
        panic!("{asked:?}");
    };
    assert_eq!(request.path, b"a/b");
    assert_eq!(request.operation, FileOperation::Write { mode: 0o640 });
    assert_eq!(received.len(), 3 << 20);
    assert_eq!(written.unwrap(), Path::new("/home/u/a/b"));
}

#[test]
fn a_file_that_the_guest_refuses_early_says_why() {
    let error = with_guest(
        |sandbox| sandbox.write("a", std::io::repeat(0)).unwrap_err(),
        |stream, _| {
            // Its unread content is thrown away: what the host sends after that breaks.
            let failure = FileFailure {
                kind: FileFailureKind::NoSpace,
                message: "No space\u{1b}[31m left".to_owned(),
            };
            answer(stream, Err(failure));
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        },
    );

    assert!(
        matches!(&error, FileError::NoSpace(what) if what == "No space [31m left"),
        "{error:?}"
    );
}

#[test]
fn a_file_on_its_way_when_the_machine_goes_is_told_so() {
    let (sandbox, peer, _agent) = ready_sandbox(None);

    let error = std::thread::scope(|scope| {
        let writing = scope.spawn(|| sandbox.write("a", std::io::repeat(0)));
        let (stream, _) = peer.accept();
        peer.end(EndReason::TripleFault, b"");
        drop(stream);
        writing.join().unwrap().unwrap_err()
    });

    assert!(matches!(error, FileError::MachineCrashed(_)), "{error:?}");
}

#[test]
fn half_a_file_is_never_taken_for_a_whole_one() {
    let metadata = FileMetadata {
        kind: FileKind::File,
        bytes: 8,
        mode: 0o644,
        uid: 0,
        gid: 0,
        modified_ns: 0,
    };

    let read = with_guest(
        |sandbox| sandbox.read("a"),
        |stream, _| {
            answer(stream, Ok(FileDone::Metadata(metadata)));
            stream.write_all(&content::header(8)).unwrap();
            stream.write_all(b"half").unwrap();
        },
    );

    assert!(matches!(read, Err(FileError::Stream(_))), "{read:?}");
}

#[test]
fn a_folder_with_names_that_lead_elsewhere_is_refused() {
    for name in [&b".."[..], b"a/b", b""] {
        let metadata = FileMetadata {
            kind: FileKind::File,
            bytes: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            modified_ns: i64::MIN,
        };
        let listed = with_guest(
            |sandbox| sandbox.list("/"),
            |stream, _| {
                answer(stream, Ok(FileDone::At(b"/".to_vec())));
                let name = name.to_vec();
                tell(stream, &FolderItem::Entry { name, metadata });
                tell(stream, &FolderItem::End);
            },
        );
        assert!(matches!(listed, Err(FileError::Guest(_))), "{listed:?}");
    }
}

fn told(kind: WatchedChange, name: &[u8]) -> WatchItem {
    let name = name.to_vec();
    WatchItem::Change { kind, name }
}

#[test]
fn a_watch_passes_on_what_the_guest_says_until_the_end() {
    let seen = with_guest(
        |sandbox| {
            let mut watch = sandbox.files().watch("folder").unwrap();
            let first = watch.next().unwrap().unwrap();
            let nothing = watch.next_within(Duration::from_millis(50));
            (first, nothing.is_none(), watch.collect::<Vec<_>>())
        },
        |stream, header| {
            let StreamKind::File(request) = header.kind else {
                panic!("{header:?}");
            };
            assert_eq!(request.operation, FileOperation::Watch);
            answer(stream, Ok(FileDone::At(b"/folder".to_vec())));
            tell(stream, &told(WatchedChange::Created, b"a"));
            std::thread::sleep(Duration::from_millis(200));
            tell(stream, &told(WatchedChange::Lost, b""));
            tell(stream, &WatchItem::End);
            tell(stream, &told(WatchedChange::Created, b"not heard"));
        },
    );

    let (first, nothing, rest) = seen;
    assert_eq!(
        (first.kind, first.name.to_str()),
        (ChangeKind::Created, Some("a"))
    );
    assert!(nothing);
    let [Ok(lost)] = &rest[..] else {
        panic!("{rest:?}");
    };
    assert_eq!((lost.kind, lost.name.is_empty()), (ChangeKind::Lost, true));
}

#[test]
fn a_watch_waits_no_longer_than_it_may_for_a_word_that_comes_in_pieces() {
    let limit = Duration::from_millis(50);
    let (go_on, gone_on) = std::sync::mpsc::channel();
    let (early, whole, took) = with_guest(
        move |sandbox| {
            let mut watch = sandbox.files().watch("folder").unwrap();
            let begun = Instant::now();
            let early = [0, 1].map(|_| watch.next_within(limit).is_none());
            let took = begun.elapsed();
            go_on.send(()).unwrap();
            (early, watch.next().unwrap().unwrap(), took)
        },
        |stream, _| {
            answer(stream, Ok(FileDone::At(b"/folder".to_vec())));
            let word = told(WatchedChange::Created, b"a");
            let word = frame::encode(&word, MAX_FROM_AGENT_BYTES).unwrap();
            let (piece, rest) = word.split_at(3);
            stream.write_all(piece).unwrap();
            gone_on.recv().unwrap();
            stream.write_all(rest).unwrap();
        },
    );

    assert_eq!(early, [true; 2]);
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert_eq!(
        (whole.kind, whole.name.to_str()),
        (ChangeKind::Created, Some("a"))
    );
}

#[test]
fn a_watch_of_names_that_lead_elsewhere_or_of_half_a_word_ends_with_an_error() {
    let lies: [(&str, &[u8]); 3] = [("a name", b".."), ("a path", b"a/b"), ("half a word", b"")];
    for (lie, name) in lies {
        let seen: Vec<_> = with_guest(
            |sandbox| sandbox.files().watch("folder").unwrap().collect(),
            |stream, _| {
                answer(stream, Ok(FileDone::At(b"/folder".to_vec())));
                if name.is_empty() {
                    stream.write_all(&[1]).unwrap();
                } else {
                    tell(stream, &told(WatchedChange::Created, name));
                }
            },
        );
        let [Err(error)] = &seen[..] else {
            panic!("{lie}: {seen:?}");
        };
        let is_right = match error {
            FileError::Guest(_) => !name.is_empty(),
            FileError::Stream(_) => name.is_empty(),
            _ => false,
        };
        assert!(is_right, "{lie}: {error:?}");
    }
}

#[test]
fn a_watch_ends_with_its_sandbox_and_says_so() {
    let (sandbox, peer, _agent) = ready_sandbox(None);

    let error = std::thread::scope(|scope| {
        let watching = scope.spawn(|| sandbox.files().watch("x").unwrap().next());
        let (mut stream, _) = peer.accept();
        answer(&mut stream, Ok(FileDone::At(b"/x".to_vec())));
        peer.end(EndReason::TripleFault, b"");
        drop(stream);
        watching.join().unwrap().unwrap().unwrap_err()
    });

    assert!(matches!(error, FileError::MachineCrashed(_)), "{error:?}");
}

#[test]
fn a_tree_is_copied_with_modes_and_times_and_without_the_dangerous_bits() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy");

    let copied = copy_out(&to, CopyLimits::default(), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        tell(stream, &entry(b"sub", TreeNode::Folder, 0o500));
        tell(stream, &entry(b"sub/tool", FILE, 0o6755));
        tell_content(stream, &[9; 100_000]);
        let target = b"/etc/passwd".to_vec();
        tell(stream, &entry(b"link", TreeNode::Link { target }, 0o777));
        tell(stream, &entry(b"device", TreeNode::Special, 0o666));
        tell(stream, &TreeItem::End);
    })
    .unwrap();

    assert_eq!(
        (copied.files, copied.folders, copied.bytes),
        (1, 2, 100_000)
    );
    assert_eq!(copied.left_out, [Path::new("link"), Path::new("device")]);
    let tool = std::fs::metadata(to.join("sub/tool")).unwrap();
    assert_eq!(tool.permissions().mode() & 0o7777, 0o755);
    assert_eq!((tool.len(), tool.mtime()), (100_000, 1_500_000_000));
    let sub = std::fs::metadata(to.join("sub")).unwrap();
    assert_eq!(sub.permissions().mode() & 0o7777, 0o500);
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), 1);
    std::fs::set_permissions(to.join("sub"), std::fs::Permissions::from_mode(0o700)).unwrap();
}

/// Copies out a folder with a file that others may write to and that runs as its owner, and gives the owners of both and the file's mode.
fn copied_owners(keep_owners: bool) -> ([(u32, u32); 2], u32) {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy");
    with_guest(
        |sandbox| {
            let files = sandbox.files().keep_owners(keep_owners);
            files.copy_out("x", &to, CopyLimits::default())
        },
        |stream, _| {
            answer(stream, Ok(FileDone::At(b"/x".to_vec())));
            tell(stream, &entry(b"", TreeNode::Folder, 0o755));
            tell(stream, &entry(b"tool", FILE, 0o6777));
            tell_content(stream, b"x");
            tell(stream, &TreeItem::End);
        },
    )
    .unwrap();
    let found = [&to, &to.join("tool")].map(|path| std::fs::metadata(path).unwrap());
    let [_, tool] = &found;
    let mode = tool.permissions().mode() & 0o7777;
    (found.map(|found| (found.uid(), found.gid())), mode)
}

#[test]
fn what_comes_out_is_this_processs_unless_owners_are_asked_for_and_may_be_given() {
    let own = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let kept = if own.0 == 0 { OWNER } else { own };

    assert_eq!(copied_owners(false), ([own; 2], 0o777));
    assert_eq!(copied_owners(true), ([kept; 2], 0o777));
}

#[test]
fn what_goes_in_says_whose_it_is_and_whether_that_counts() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("file");
    std::fs::write(&from, "x").unwrap();
    let found = std::fs::metadata(&from).unwrap();
    for keep_owners in [false, true] {
        let mut heard = None;
        with_guest(
            |sandbox| {
                let files = sandbox.files().keep_owners(keep_owners);
                files.copy_in(&from, "to")
            },
            |stream, header| {
                let item: TreeItem = frame::read(stream, MAX_TO_AGENT_BYTES).unwrap();
                let mut content = Vec::new();
                ContentReader::new(&mut *stream)
                    .read_to_end(&mut content)
                    .unwrap();
                let end: TreeItem = frame::read(stream, MAX_TO_AGENT_BYTES).unwrap();
                assert_eq!((content.as_slice(), end), (&b"x"[..], TreeItem::End));
                answer(stream, Ok(FileDone::At(b"/to".to_vec())));
                heard = Some((header.kind, item));
            },
        )
        .unwrap();

        let Some((StreamKind::File(request), TreeItem::Entry { uid, gid, .. })) = heard else {
            panic!("{heard:?}");
        };
        assert_eq!(request.operation, FileOperation::WriteTree { keep_owners });
        assert_eq!((uid, gid), (found.uid(), found.gid()));
    }
}

#[test]
fn what_is_named_and_can_not_be_copied_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy");
    let link = TreeNode::Link {
        target: b"a".to_vec(),
    };

    for node in [link, TreeNode::Special] {
        let error = copy_out(&to, CopyLimits::default(), move |stream| {
            tell(stream, &entry(b"", node.clone(), 0o666));
            tell(stream, &TreeItem::End);
        })
        .unwrap_err();

        assert!(matches!(error, FileError::WrongKind(_)), "{error}");
        assert!(!to.exists());
    }
}

#[test]
fn nothing_is_made_outside_the_target() {
    let hostile: [&[u8]; 6] = [
        b"..",
        b"../out",
        b"/out",
        b"a/../../out",
        b"./out",
        b"sub//out",
    ];
    for path in hostile {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("copy");
        for node in [FILE, TreeNode::Folder] {
            let error = copy_out(&to, CopyLimits::default(), |stream| {
                tell(stream, &entry(b"", TreeNode::Folder, 0o755));
                tell(stream, &entry(b"sub", TreeNode::Folder, 0o755));
                tell(stream, &entry(path, node, 0o755));
                tell_content(stream, b"out");
                tell(stream, &TreeItem::End);
            })
            .unwrap_err();
            assert!(matches!(error, FileError::Guest(_)), "{error:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_link_on_the_way_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (to, outside) = (folder.path().join("copy"), folder.path().join("outside"));
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir(&to).unwrap();
    // Somebody on the host, or a copy before, has left links.
    symlink(&outside, to.join("sub")).unwrap();
    std::fs::write(outside.join("kept"), "kept").unwrap();
    symlink(outside.join("kept"), to.join("file")).unwrap();

    let through = copy_out(&to, CopyLimits::default(), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        tell(stream, &entry(b"sub/file", FILE, 0o644));
        tell_content(stream, b"new");
        tell(stream, &TreeItem::End);
    });
    let as_folder = copy_out(&to, CopyLimits::default(), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        tell(stream, &entry(b"sub", TreeNode::Folder, 0o755));
        tell(stream, &TreeItem::End);
    });
    copy_out(&to, CopyLimits::default(), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        tell(stream, &entry(b"file", FILE, 0o644));
        tell_content(stream, b"new");
        tell(stream, &TreeItem::End);
    })
    .unwrap();

    assert!(
        matches!(through, Err(FileError::Host { .. })),
        "{through:?}"
    );
    assert!(
        matches!(as_folder, Err(FileError::Host { .. })),
        "{as_folder:?}"
    );
    assert_eq!(std::fs::read(outside.join("kept")).unwrap(), b"kept");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    assert!(
        std::fs::symlink_metadata(to.join("file"))
            .unwrap()
            .is_file()
    );
}

#[test]
fn the_caps_hold_and_half_a_file_is_not_left() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy");

    let bytes = copy_out(&to, CopyLimits::default().bytes(1000), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        tell(stream, &entry(b"a", FILE, 0o644));
        tell_content(stream, &[0; 999]);
        tell(stream, &entry(b"b", FILE, 0o644));
        tell_content(stream, &[0; 2]);
        tell(stream, &TreeItem::End);
    });
    let entries = copy_out(&to, CopyLimits::default().entries(3), |stream| {
        tell(stream, &entry(b"", TreeNode::Folder, 0o755));
        for _ in 0..3 {
            tell(stream, &entry(b"link", TreeNode::Special, 0));
        }
        tell(stream, &TreeItem::End);
    });

    assert!(
        matches!(bytes, Err(FileError::TooLarge { .. })),
        "{bytes:?}"
    );
    assert!(
        matches!(entries, Err(FileError::TooLarge { .. })),
        "{entries:?}"
    );
    let left: Vec<_> = std::fs::read_dir(&to)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["a"]);
}

#[test]
fn a_file_that_is_too_large_is_refused_before_it_comes() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy");
    let large = |bytes| entry(b"", TreeNode::File { bytes }, 0o644);

    // Its content never comes.
    let refused = copy_out(&to, CopyLimits::default(), |stream| {
        tell(stream, &large((4 << 30) + 1));
        let _ = stream.read(&mut [0]);
    });
    let whole = copy_out(&to, CopyLimits::default().bytes(5), |stream| {
        tell(stream, &large(5));
        tell_content(stream, b"12345");
        tell(stream, &TreeItem::End);
    });

    let refused = refused.unwrap_err().to_string();
    assert_eq!(refused, "What is to be copied is larger than 4096 MiB");
    assert_eq!(whole.unwrap().bytes, 5);
}

#[test]
fn a_tree_without_a_root_or_with_two_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for items in [
        vec![],
        vec![entry(b"a", TreeNode::Folder, 0o755)],
        vec![
            entry(b"", TreeNode::Folder, 0o755),
            entry(b"", TreeNode::Folder, 0o755),
        ],
    ] {
        let copied = copy_out(
            &folder.path().join("copy"),
            CopyLimits::default(),
            |stream| {
                for item in &items {
                    tell(stream, item);
                }
                tell(stream, &TreeItem::End);
            },
        );
        assert!(matches!(copied, Err(FileError::Guest(_))), "{copied:?}");
    }
}
