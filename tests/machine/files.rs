//! Files into the guest and out of it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use sandvmm_tests::run;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_tree_goes_in_and_comes_out_with_modes_and_times_and_is_the_users() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("in");
    fs::create_dir_all(source.join("sub/empty")).unwrap();
    fs::write(source.join("sub/data"), vec![b'd'; 5_000_000]).unwrap();
    fs::write(source.join("tool"), "#!/bin/sh\necho from the tool\n").unwrap();
    fs::set_permissions(source.join("tool"), fs::Permissions::from_mode(0o750)).unwrap();
    symlink("sub/data", source.join("link")).unwrap();
    let target = folder.path().join("out");
    let program = "set -e; work/tool; stat -c '%U %a' work/tool work/sub; wc -c < work/link
        echo made > work/sub/new; chmod 604 work/sub/new; test ! -L work/sub/data";

    let ran = run(["--upload"])
        .arg(format!("{}:work", source.display()))
        .arg("--download")
        .arg(format!("work:{}", target.display()))
        .args(["--", "sh", "-c", program])
        .done()
        .expect(0);

    let owner = ran
        .text()
        .lines()
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .to_owned();
    assert_ne!(owner, "root");
    assert_eq!(
        ran.text(),
        format!("from the tool\n{owner} 750\n{owner} 755\n5000000\n")
    );
    assert!(
        ran.stderr.contains("link"),
        "what was left out is said: {ran:?}"
    );
    assert_eq!(
        fs::read(target.join("sub/data")).unwrap(),
        vec![b'd'; 5_000_000]
    );
    assert_eq!(fs::read(target.join("sub/new")).unwrap(), b"made\n");
    assert!(target.join("sub/empty").is_dir());
    let mode = |name: &str| fs::metadata(target.join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("tool"), mode("sub/new")), (0o750, 0o604));
    let modified = |path: &std::path::Path| fs::metadata(path).unwrap().mtime();
    assert_eq!(
        modified(&target.join("tool")),
        modified(&source.join("tool"))
    );
    fs::symlink_metadata(target.join("link")).unwrap_err();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_a_program_leaves_for_its_reader_is_no_trap() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let program =
        "mkdir out; cd out; ln -s /etc/passwd a; ln -s .. up; mkfifo pipe; echo b > b; ln b hard
        mknod null c 1 3; printf x > set; chmod 6755 set; : > \"$(printf 'new\\nline')\"; exit 3";

    let ran = run(["-u", "root", "--download"])
        .arg(format!("out:{}", target.display()))
        .args(["--", "sh", "-c", program])
        .done()
        .expect(3);

    let mut names: Vec<_> = fs::read_dir(&target)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["b", "hard", "new\nline", "set"], "{ran:?}");
    assert_eq!(
        fs::metadata(target.join("set")).unwrap().mode() & 0o7777,
        0o755
    );
    assert!(ran.stderr.contains("4 files were not copied"), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_copy_that_fails_is_named_and_the_programs_end_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let nothing = format!("nothing:{}", target.display());

    let no_source = run(["--upload", "/no/such/file:x", "--", "echo", "ran"])
        .done()
        .expect(2);
    let no_result = run(["--download", &nothing, "--", "echo", "ran"])
        .done()
        .expect(125);
    let failed_itself = run(["--json", "--download", &nothing, "--", "sh", "-c", "exit 3"])
        .done()
        .expect(3);
    let forbidden = run(["--upload", "/etc/hostname:/etc/x", "--", "echo", "ran"])
        .done()
        .expect(125);

    assert!(no_source.stderr.contains("/no/such/file"), "{no_source:?}");
    assert_eq!(no_source.text(), "");
    assert_eq!(no_result.text(), "ran\n");
    assert!(no_result.stderr.contains("nothing"), "{no_result:?}");
    let report: serde_json::Value = serde_json::from_slice(&failed_itself.stdout).unwrap();
    assert_eq!(report["reason"], "exited", "{report}");
    assert_eq!(report["error"], "download", "{report}");
    assert!(
        report["message"].as_str().unwrap().contains("nothing"),
        "{report}"
    );
    assert!(forbidden.stderr.contains("/etc/x"), "{forbidden:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
