//! What a template was given while it was built, and what its forks are not: files, secrets, disks.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use sandvmm::{Sandbox, TemplateError};
use sandvmm_tests::Ran;

use super::{Home, say};

/// The value of the secret.
const VALUE: &str = "hunter2-a-long-one";

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_was_copied_is_compared_and_named() {
    let home = Home::new();
    let host = |name: &str| home.0.path().join(name);
    fs::write(host("file"), "copied").unwrap();
    fs::create_dir_all(host("folder/sub")).unwrap();
    fs::write(host("folder/sub/tool"), "#!/bin/sh\necho tool\n").unwrap();
    fs::set_permissions(host("folder/sub/tool"), Permissions::from_mode(0o755)).unwrap();
    let copy = |name: &str| format!("{}:/var/tmp/{name}", host(name).display());
    let build = |name: &str| {
        let copies = [copy("file"), copy("folder")];
        home.build(name, &["--copy", &copies[0], "--copy", &copies[1]]);
        home.inputs_digest(name)
    };
    let digest = build("t");
    let forked = || -> Ran {
        let script = "cat /var/tmp/file; /var/tmp/folder/sub/tool";
        let fork = [
            "--template",
            "t",
            "--timeout",
            "200s",
            "--",
            "sh",
            "-c",
            script,
        ];
        home.run(&fork).done()
    };
    let verified = || home.sandvmm(&["template", "verify", "t"]).done();
    let refused = |ran: Ran, name: &str| {
        let path = host(name).canonicalize().unwrap_or_else(|_| host(name));
        let stderr = ran.expect(125).stderr;
        assert!(
            stderr.contains("copied") && stderr.contains(&*path.to_string_lossy()),
            "{stderr}"
        );
    };
    assert_eq!(forked().expect(0).text(), "copiedtool\n");
    verified().expect(0);

    // A file is looked at for each fork, a folder when all is read.
    fs::write(host("file"), "other!").unwrap();
    refused(forked(), "file");
    refused(verified(), "file");
    assert_ne!(build("other"), digest);
    fs::write(host("file"), "copied").unwrap();
    forked().expect(0);
    fs::set_permissions(host("folder/sub/tool"), Permissions::from_mode(0o711)).unwrap();
    forked().expect(0);
    refused(verified(), "folder");
    fs::set_permissions(host("folder/sub/tool"), Permissions::from_mode(0o755)).unwrap();
    verified().expect(0);
    assert_eq!(build("again"), digest);

    // What is gone has not changed: the copy is in the template.
    fs::remove_file(host("file")).unwrap();
    assert_eq!(forked().expect(0).text(), "copiedtool\n");
    refused(verified(), "file");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_template_with_secrets_is_forked_by_who_says_so_alone() {
    let home = Home::new();
    let build = |name: &str| {
        let options = ["--secret", "TOKEN", "--run", "echo $TOKEN > /var/tmp/kept"];
        home.sandvmm(&["template", "build", name, "--memory", "128M"])
            .args(options)
            .env("TOKEN", VALUE)
            .done()
            .expect(0)
    };
    let built = build("t");
    assert!(!built.text().contains(VALUE), "{built:?}");
    let inspected = home.sandvmm(&["template", "inspect", "t"]).done().expect(0);
    assert_eq!(inspected.json()["built_with_secrets"], true);
    assert!(!inspected.text().contains(VALUE), "{inspected:?}");
    let words = ["--timeout", "200s", "--json", "--", "cat", "/var/tmp/kept"];
    let cat = |options: &[&str]| home.run(&[options, &words].concat()).done();

    let refused = cat(&["--template", "t"]).expect(2);
    assert!(
        refused.json()["message"]
            .as_str()
            .unwrap()
            .contains("secrets"),
        "{refused:?}"
    );
    let told = cat(&["--template", "t", "--share-secrets"]).expect(0);
    assert_eq!(told.json()["stdout"], format!("{VALUE}\n"));

    // Nor is it forked by who asked for no template.
    build("default");
    let booted = cat(&["--memory", "128M"]).expect(1).json();
    assert!(booted["template"].is_null(), "{booted}");
    let why = booted["path_reason"].as_str().unwrap();
    assert!(why.contains("secrets"), "{why}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn forks_have_no_disk_but_their_templates() {
    let home = Home::new();
    home.build("t", &[]);
    let with = |options: &[&str]| {
        let fork = ["--template", "t", "--timeout", "200s"];
        home.run(&[&fork, options, &["--", "true"]].concat()).done()
    };
    for options in [&["--workspace", "w"][..], &["--disk", "64M"]] {
        let refused = with(options).expect(2);
        assert!(refused.stderr.contains("cannot be used"), "{refused:?}");
    }
    with(&[]).expect(0);

    // And what has one of its own is no template.
    let builder = Sandbox::builder().memory_mib(128).scratch_disk_mib(64);
    let sandbox = builder.start().unwrap();
    let error = sandbox.snapshot("with-a-disk").unwrap_err();
    assert!(matches!(error, TemplateError::Workspace), "{error}");
    assert!(error.to_string().contains("scratch disk"), "{error}");
    assert_eq!(say(&sandbox, "echo goes on"), "goes on\n");
}
