use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use protocol::content::{self, ContentReader, MAX_PIECE_BYTES};
use protocol::file::{
    FileAnswer, FileDone, FileFailure, FileFailureKind, FileKind, FileOperation, FileRequest,
    FolderItem, TreeItem, TreeNode, WatchItem, WatchedChange,
};
use protocol::frame::{self, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};

use rustix::fs::OFlags;

use crate::users::{Accounts, User};

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(20);
/// Trees that are read while a program changes them: one in some hundred is changed between the two looks at a file.
const TREES: usize = 5000;

/// Asks for something, has `send` send what goes with it, and returns the answer and the stream behind it.
fn ask(
    home: &Path,
    path: &[u8],
    operation: FileOperation,
    send: impl FnOnce(&mut UnixStream),
) -> (Result<FileDone, FileFailure>, UnixStream) {
    let (mut host, guest) = UnixStream::pair().unwrap();
    let request = FileRequest {
        path: path.to_vec(),
        user: None,
        operation,
    };
    let user = User {
        home: home.to_str().unwrap().to_owned(),
        ..Accounts::default().resolve(None).unwrap()
    };
    thread::spawn(move || super::serve(&OwnedFd::from(guest).into(), &request, Ok(user)));
    send(&mut host);
    let answer: FileAnswer = frame::read(&mut host, MAX_FROM_AGENT_BYTES).unwrap();
    (answer.result, host)
}

fn do_it(home: &Path, path: &str, operation: FileOperation) -> Result<FileDone, FileFailure> {
    ask(home, path.as_bytes(), operation, |_| {}).0
}

fn send_content(host: &mut UnixStream, content: &[u8]) {
    // Refused paths are answered without reading.
    for piece in content.chunks(MAX_PIECE_BYTES).chain([&[][..]]) {
        let _ = host.write_all(&content::header(piece.len()));
        let _ = host.write_all(piece);
    }
}

fn write(home: &Path, path: &str, mode: u32, content: &[u8]) -> Result<FileDone, FileFailure> {
    let operation = FileOperation::Write { mode };
    ask(home, path.as_bytes(), operation, |host| {
        send_content(host, content)
    })
    .0
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_file_arrives_whole_with_its_mode_and_folders() {
    let home = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();

    let done = write(home.path(), "a/b/file", 0o751, &content).unwrap();

    let expected = home.path().join("a/b/file");
    assert_eq!(done, FileDone::At(expected.as_os_str().as_bytes().to_vec()));
    assert_eq!(fs::read(&expected).unwrap(), content);
    assert_eq!(mode(&expected), 0o751);
    assert_eq!(fs::read_dir(expected.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn a_link_in_the_files_place_is_replaced_not_followed() {
    let home = tempfile::tempdir().unwrap();
    let victim = home.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    symlink(&victim, home.path().join("link")).unwrap();

    write(home.path(), "link", 0o600, b"new").unwrap();

    assert_eq!(fs::read(victim).unwrap(), b"kept");
    assert_eq!(fs::read(home.path().join("link")).unwrap(), b"new");
}

#[test]
fn test_write_to_no_file_name_returns_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("folder")).unwrap();
    for path in ["", ".", "..", "a/", "a/.", "folder"] {
        let error = write(home.path(), path, 0o600, b"").unwrap_err();
        assert!(error.message.starts_with("The "), "{path}: {error:?}");
    }
    assert!(
        fs::read_dir(home.path())
            .unwrap()
            .all(|entry| entry.unwrap().path().is_dir())
    );
}

#[test]
fn a_content_without_its_end_makes_no_file() {
    let home = tempfile::tempdir().unwrap();

    let half = |host: &mut UnixStream| {
        host.write_all(&content::header(4)).unwrap();
        host.write_all(b"ha").unwrap();
        host.shutdown(std::net::Shutdown::Write).unwrap();
    };
    let (written, _) = ask(
        home.path(),
        b"file",
        FileOperation::Write { mode: 0o600 },
        half,
    );

    written.unwrap_err();
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn a_file_is_read_whole_and_nothing_else_is() {
    let home = tempfile::tempdir().unwrap();
    let content = vec![7; 200_000];
    fs::write(home.path().join("file"), &content).unwrap();
    symlink("file", home.path().join("link")).unwrap();

    for name in ["file", "link"] {
        let (result, stream) = ask(home.path(), name.as_bytes(), FileOperation::Read, |_| {});
        let mut read = Vec::new();
        ContentReader::new(stream).read_to_end(&mut read).unwrap();
        let FileDone::Metadata(metadata) = result.unwrap() else {
            panic!("no metadata");
        };
        assert_eq!((metadata.kind, metadata.bytes), (FileKind::File, 200_000));
        assert_eq!(read, content);
    }
    for (path, kind) in [
        ("none", FileFailureKind::NotFound),
        (".", FileFailureKind::WrongKind),
        ("/dev/null", FileFailureKind::WrongKind),
        ("file/below", FileFailureKind::WrongKind),
    ] {
        let failure = do_it(home.path(), path, FileOperation::Read).unwrap_err();
        assert_eq!(failure.kind, kind, "{path}: {failure:?}");
    }
}

/// Has `test` run on a thread of its own, and fails when it hangs.
fn in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = std::sync::mpsc::channel();
    thread::spawn(move || done.send(test()));
    is_done.recv_timeout(PATIENCE).unwrap()
}

fn make_pipe(path: &Path) {
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
}

#[test]
fn nothing_that_a_program_puts_in_a_files_place_is_waited_for_or_followed() {
    let home = tempfile::tempdir().unwrap();
    let (pipe, link) = (home.path().join("pipe"), home.path().join("link"));
    make_pipe(&pipe);
    symlink("/etc/passwd", &link).unwrap();

    let program = pipe.clone();
    let checked = in_time(move || crate::program::check_format(&program).is_ok());
    let opened = in_time(move || super::open_regular(&pipe, OFlags::NOFOLLOW).map(drop));
    let followed = super::open_regular(&link, OFlags::NOFOLLOW).map(drop);

    assert!(checked, "what it is instead is found when it is executed");
    assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(
        followed.unwrap_err().raw_os_error(),
        Some(rustix::io::Errno::LOOP.raw_os_error())
    );
}

#[test]
fn a_tree_in_which_files_become_pipes_is_read_to_an_end() {
    let home = tempfile::tempdir().unwrap();
    let (file, pipe) = (home.path().join("tree/file"), home.path().join("pipe"));
    fs::create_dir(home.path().join("tree")).unwrap();
    fs::write(&file, "content").unwrap();
    make_pipe(&pipe);
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let swapping = thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            rustix::fs::renameat_with(
                rustix::fs::CWD,
                &file,
                rustix::fs::CWD,
                &pipe,
                rustix::fs::RenameFlags::EXCHANGE,
            )
            .unwrap();
        }
    });

    for _ in 0..TREES {
        let (result, mut stream) = ask(home.path(), b"tree", FileOperation::ReadTree, |_| {});
        result.unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    }

    is_over.store(true, Ordering::Relaxed);
    swapping.join().unwrap();
}

#[test]
fn folders_are_made_listed_renamed_and_removed() {
    let home = tempfile::tempdir().unwrap();
    do_it(home.path(), "a/b", FileOperation::MakeFolder).unwrap();
    do_it(home.path(), "a/b", FileOperation::MakeFolder).unwrap();
    fs::write(home.path().join("a/b/file"), "12345").unwrap();
    symlink("/", home.path().join("a/b/link")).unwrap();

    let (result, mut stream) = ask(home.path(), b"a/b", FileOperation::List, |_| {});
    result.unwrap();
    let mut listed = Vec::new();
    loop {
        match frame::read(&mut stream, MAX_FROM_AGENT_BYTES).unwrap() {
            FolderItem::Entry { name, metadata } => listed.push((name, metadata.kind)),
            FolderItem::End => break,
            FolderItem::Failed(failure) => panic!("{failure:?}"),
        }
    }
    listed.sort_by(|one, two| one.0.cmp(&two.0));
    let expected = [
        (b"file".to_vec(), FileKind::File),
        (b"link".to_vec(), FileKind::Link),
    ];
    assert_eq!(listed, expected);

    do_it(
        home.path(),
        "a/b",
        FileOperation::Rename { to: b"c".to_vec() },
    )
    .unwrap();
    assert!(home.path().join("c/file").exists() && !home.path().join("a/b").exists());
    do_it(home.path(), "c", FileOperation::Remove).unwrap();
    assert!(!home.path().join("c").exists() && Path::new("/").exists());
    let failure = do_it(home.path(), "c", FileOperation::Remove).unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotFound);
}

#[test]
fn a_tree_that_was_read_can_be_written_again() {
    let home = tempfile::tempdir().unwrap();
    let from = home.path().join("from");
    fs::create_dir_all(from.join("empty")).unwrap();
    fs::create_dir_all(from.join("deep/er")).unwrap();
    fs::write(from.join("deep/er/file"), vec![3; 100_000]).unwrap();
    fs::set_permissions(from.join("deep/er/file"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(from.join("deep"), fs::Permissions::from_mode(0o710)).unwrap();
    symlink("deep/er/file", from.join("link")).unwrap();

    let (result, mut read) = ask(home.path(), b"from", FileOperation::ReadTree, |_| {});
    result.unwrap();
    let copy = move |host: &mut UnixStream| {
        loop {
            let item: TreeItem = frame::read(&mut read, MAX_FROM_AGENT_BYTES).unwrap();
            frame::write(host, &item, MAX_TO_AGENT_BYTES).unwrap();
            match item {
                TreeItem::Entry {
                    node: TreeNode::File { .. },
                    ..
                } => {
                    let mut content = Vec::new();
                    ContentReader::new(&mut read)
                        .read_to_end(&mut content)
                        .unwrap();
                    send_content(host, &content);
                }
                TreeItem::End => break,
                _ => {}
            }
        }
    };
    // Who may not give files away keeps them: it is no failure.
    let write = FileOperation::WriteTree { keep_owners: true };
    ask(home.path(), b"x/to", write, copy).0.unwrap();

    let to = home.path().join("x/to");
    assert_eq!(fs::read(to.join("link")).unwrap(), vec![3; 100_000]);
    assert_eq!(
        fs::read_link(to.join("link")).unwrap(),
        Path::new("deep/er/file")
    );
    assert_eq!(
        (mode(&to.join("deep/er/file")), mode(&to.join("deep"))),
        (0o640, 0o710)
    );
    assert!(to.join("empty").is_dir());
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    for path in ["deep/er/file", "deep", "."] {
        assert_eq!(modified(&to.join(path)), modified(&from.join(path)));
    }
    let link = |tree: &Path| fs::symlink_metadata(tree.join("link")).unwrap();
    assert_eq!(
        link(&to).modified().unwrap(),
        link(&from).modified().unwrap()
    );
}

/// Writes a file with a set-user bit, a link and a folder of another user, and gives the owners and the mode that came of it.
fn written_owners(keep_owners: bool) -> ([(u32, u32); 3], u32) {
    let home = tempfile::tempdir().unwrap();
    let send = |host: &mut UnixStream| {
        let file = TreeNode::File { bytes: 1 };
        let link = TreeNode::Link {
            target: b"file".to_vec(),
        };
        for (path, node) in [("", TreeNode::Folder), ("file", file), ("link", link)] {
            let has_content = matches!(node, TreeNode::File { .. });
            let entry = TreeItem::Entry {
                path: path.into(),
                node,
                mode: 0o4755,
                uid: 4321,
                gid: 1234,
                modified_ns: 0,
            };
            frame::write(host, &entry, MAX_TO_AGENT_BYTES).unwrap();
            if has_content {
                send_content(host, b"x");
            }
        }
        frame::write(host, &TreeItem::End, MAX_TO_AGENT_BYTES).unwrap();
    };
    let write = FileOperation::WriteTree { keep_owners };
    ask(home.path(), b"to", write, send).0.unwrap();
    let to = home.path().join("to");
    let owner = |path: &Path| {
        let found = fs::symlink_metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    let owners = [owner(&to), owner(&to.join("file")), owner(&to.join("link"))];
    (owners, mode(&to.join("file")))
}

#[test]
fn owners_are_kept_where_that_is_asked_for_and_the_user_may() {
    let own = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let kept = if own.0 == 0 { (4321, 1234) } else { own };

    assert_eq!(written_owners(true), ([kept; 3], 0o4755));
    assert_eq!(written_owners(false), ([own; 3], 0o4755));
}

#[test]
fn a_tree_stays_beneath_its_root() {
    let home = tempfile::tempdir().unwrap();
    for path in ["..", "../x", "/x", "a/../../x", "./x"] {
        let send = |host: &mut UnixStream| {
            let root = TreeItem::Entry {
                path: Vec::new(),
                node: TreeNode::Folder,
                mode: 0o755,
                uid: 0,
                gid: 0,
                modified_ns: 0,
            };
            let entry = TreeItem::Entry {
                path: path.into(),
                node: TreeNode::Folder,
                mode: 0o755,
                uid: 0,
                gid: 0,
                modified_ns: 0,
            };
            for item in [root, entry, TreeItem::End] {
                let _ = frame::write(host, &item, MAX_TO_AGENT_BYTES);
            }
        };
        let write = FileOperation::WriteTree { keep_owners: false };
        ask(home.path(), b"root", write, send).0.unwrap_err();
    }
    assert!(!home.path().join("x").exists());
}

fn watched(stream: &mut UnixStream) -> WatchItem {
    frame::read(stream, MAX_FROM_AGENT_BYTES).unwrap()
}

fn change(kind: WatchedChange, name: &[u8]) -> WatchItem {
    let name = name.to_vec();
    WatchItem::Change { kind, name }
}

#[test]
fn what_happens_in_a_watched_folder_is_told_in_its_order() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let (answer, mut stream) = ask(home.path(), b"folder", FileOperation::Watch, |_| {});
    answer.unwrap();

    fs::write(folder.join("a"), "1").unwrap();
    fs::rename(folder.join("a"), folder.join("b")).unwrap();
    fs::set_permissions(folder.join("b"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(folder.join("b")).unwrap();
    fs::remove_dir(&folder).unwrap();

    use WatchedChange::*;
    let expected = [
        change(Created, b"a"),
        change(Modified, b"a"),
        change(Written, b"a"),
        change(MovedAway, b"a"),
        change(MovedHere, b"b"),
        change(Attributes, b"b"),
        change(Removed, b"b"),
        WatchItem::End,
    ];
    for item in expected {
        assert_eq!(watched(&mut stream), item);
    }
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_file_is_watched_by_itself_and_one_that_is_not_there_is_refused() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("file"), "1").unwrap();
    let (answer, mut stream) = ask(home.path(), b"file", FileOperation::Watch, |_| {});
    answer.unwrap();

    fs::write(home.path().join("file"), "").unwrap();
    fs::rename(home.path().join("file"), home.path().join("elsewhere")).unwrap();

    // Cutting is a change, and nothing was written.
    assert_eq!(watched(&mut stream), change(WatchedChange::Modified, b""));
    assert_eq!(watched(&mut stream), change(WatchedChange::Written, b""));
    assert_eq!(watched(&mut stream), WatchItem::End);
    let missing = do_it(home.path(), "missing", FileOperation::Watch).unwrap_err();
    assert_eq!(missing.kind, FileFailureKind::NotFound);
}

#[test]
fn a_watch_ends_when_the_host_closes_its_stream() {
    let home = tempfile::tempdir().unwrap();
    let (host, guest) = UnixStream::pair().unwrap();
    let path = home.path().to_owned();
    let watching = thread::spawn(move || super::watch::send(&OwnedFd::from(guest).into(), &path));
    let answer: FileAnswer = frame::read(&mut &host, MAX_FROM_AGENT_BYTES).unwrap();
    answer.result.unwrap();

    drop(host);

    watching.join().unwrap();
}
