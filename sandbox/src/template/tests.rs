//! Templates of which something has changed. Their machines never run here: whole ones are tested in a KVM host.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::template::check::digest;

/// A template whose files hold nothing that could run, but are on record, on a host that is known.
struct Folder {
    folder: tempfile::TempDir,
    manifest: Manifest,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["kernel", "initramfs", STATE, MEMORY, WORKING_SET] {
            fs::write(path(name), name).unwrap();
        }
        fs::write(path("rootfs"), [7; 512]).unwrap();
        let sha256 = |name: &str, content| {
            digest(&File::open(path(name)).unwrap(), &path(name), content).unwrap()
        };
        let input = |name: &str| InputFile {
            path: path(name),
            sha256: sha256(name, Content::Whole),
        };
        let inputs = Inputs {
            kernel: input("kernel"),
            initramfs: input("initramfs"),
            rootfs: input("rootfs"),
            ..manifest::tests::inputs()
        };
        let own = |name, content| OwnFile {
            bytes: 1,
            sha256: sha256(name, content),
        };
        let manifest = Manifest {
            format: FORMAT,
            sandvmm: "0".into(),
            built_at_s: 0,
            inputs_digest: inputs.digest(),
            inputs,
            built_with_secrets: false,
            memory: own(MEMORY, Content::Sparse),
            memory_used_bytes: 0,
            state: own(STATE, Content::Whole),
            working_set: Some(own(WORKING_SET, Content::Whole)),
            hostname: None,
        };
        let made = Self { folder, manifest };
        made.record();
        made
    }

    fn record(&self) {
        let text = serde_json::to_vec(&self.manifest).unwrap();
        fs::write(self.folder.path().join(MANIFEST), text).unwrap();
    }

    fn open(&self) -> Result<Template, TemplateError> {
        let mut note = Note::read(self.folder.path());
        note.set_this_boot();
        Template::open_folder(self.folder.path(), note)
    }

    /// Changes a bit of a file, whose length stays.
    fn flip(&self, name: &str) {
        let path = self.folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_template_opens_as_long_as_nothing_has_changed() {
    let folder = Folder::new();
    for _ in 0..2 {
        let template = folder.open().unwrap();
        assert_eq!(*template.manifest(), folder.manifest);
        template.fork_files().unwrap();
    }
}

#[test]
fn whatever_has_changed_is_named() {
    for (name, role) in [
        ("kernel", "kernel"),
        ("initramfs", "initramfs"),
        ("rootfs", "root image"),
        (STATE, "state"),
        (MEMORY, "memory"),
        (WORKING_SET, "working set"),
    ] {
        let folder = Folder::new();
        folder.open().unwrap();
        // So that the time of the change is another one on any file system.
        std::thread::sleep(std::time::Duration::from_millis(20));
        folder.flip(name);
        let error = folder.open().unwrap_err();
        assert!(
            matches!(error, TemplateError::Changed { role: named, .. } if named == role),
            "{error}"
        );
        folder.flip(name);
        folder.open().unwrap();
        fs::remove_file(folder.folder.path().join(name)).unwrap();
        let error = folder.open().unwrap_err();
        assert!(
            matches!(error, TemplateError::Changed { role: named, .. } if named == role),
            "{error}"
        );
    }
}

#[test]
fn what_can_not_be_opened_is_not_called_changed() {
    for name in ["kernel", MEMORY] {
        let folder = Folder::new();
        let path = folder.folder.path().join(name);
        fs::remove_file(&path).unwrap();
        // ELOOP: to root there is nothing that it may not read.
        symlink(&path, &path).unwrap();

        let error = folder.open().unwrap_err();

        assert!(
            matches!(
                error,
                TemplateError::File {
                    action: "Opening",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_manifest_that_was_changed_is_refused() {
    let mut folder = Folder::new();
    folder.manifest.inputs.memory_mib += 1;
    folder.record();
    assert!(matches!(folder.open(), Err(TemplateError::Manifest { .. })));

    folder.manifest.format = FORMAT + 1;
    folder.record();
    let error = folder.open().unwrap_err();
    assert!(error.to_string().contains("another version"), "{error}");

    let path = folder.folder.path().join(MANIFEST);
    for text in ["", "{", "[]", "{\"format\": 1}"] {
        fs::write(&path, text).unwrap();
        assert!(matches!(folder.open(), Err(TemplateError::Manifest { .. })));
    }
    let long = vec![b' '; usize::try_from(MAX_MANIFEST_BYTES).unwrap() + 1];
    fs::write(&path, long).unwrap();
    assert!(matches!(folder.open(), Err(TemplateError::Manifest { .. })));
}

#[test]
fn secrets_are_shared_only_when_somebody_says_so() {
    let mut folder = Folder::new();
    folder.manifest.built_with_secrets = true;
    folder.record();
    let template = folder.open().unwrap();

    let error = template.fork_files().unwrap_err();
    assert!(error.to_string().contains("secrets"), "{error}");
    template.share_secrets().fork_files().unwrap();
}

#[test]
fn a_forks_machine_is_the_templates() {
    let folder = Folder::new();
    let template = folder.open().unwrap();
    for builder in [
        template.sandbox().cpus(2),
        template.sandbox().memory_mib(64),
        template.sandbox().kernel("/k"),
        template.sandbox().rootfs("/r"),
    ] {
        let error = builder.start().unwrap_err();
        assert!(matches!(error, StartError::InvalidOption { .. }), "{error}");
    }
}

#[test]
fn a_folder_that_can_not_be_written_is_opened_all_the_same() {
    let folder = Folder::new();
    let path = folder.folder.path();
    fs::set_permissions(path, fs::Permissions::from_mode(0o555)).unwrap();
    let opened = folder.open();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    opened.unwrap();
}

#[test]
fn a_template_that_is_replaced_while_it_is_opened_is_the_new_one() {
    let (half, new) = (Folder::new(), Folder::new());
    half.flip(MEMORY);
    let root = tempfile::tempdir().unwrap();
    let place = root.path().join("t");
    let put = |folder: &Folder| {
        let next = root.path().join("next");
        symlink(folder.folder.path(), &next).unwrap();
        fs::rename(&next, &place).unwrap();
    };
    put(&half);
    let opened_times = std::cell::Cell::new(0);

    let opened = Template::open_steady(&place, |folder| {
        // The files of the first time are those of no whole one, as of half the old and half the new.
        put(if opened_times.get() == 0 { &half } else { &new });
        opened_times.set(opened_times.get() + 1);
        let mut note = Note::read(folder);
        note.set_this_boot();
        note
    });

    opened.unwrap();
    assert_eq!(opened_times.get(), 2);
}

#[test]
fn a_template_that_has_changed_is_not_opened_again_and_again() {
    let folder = Folder::new();
    folder.flip(MEMORY);
    let opened_times = std::cell::Cell::new(0);

    let opened = Template::open_steady(folder.folder.path(), |_| {
        opened_times.set(opened_times.get() + 1);
        let mut note = Note::default();
        note.set_this_boot();
        note
    });

    assert!(matches!(opened, Err(TemplateError::Changed { .. })));
    assert_eq!(opened_times.get(), 1);
}
