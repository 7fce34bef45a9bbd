//! Builds the hostile guest for the tests that boot it: a workspace of its own, as nothing else here is freestanding.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a build script fails by panicking"
)]

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// What cargo tells a build script, and what is said to rustc for the suite: none of it is meant for the guest.
const NOT_FOR_THE_GUEST: [&str; 8] = [
    "CARGO_ENCODED_RUSTFLAGS",
    "RUSTFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "CARGO_BUILD_TARGET",
    "CARGO_TARGET_DIR",
    "CLIPPY_ARGS",
    "TARGET",
];

fn main() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("hostile-guest");
    for part in ["src", "build.rs", "link.ld", "Cargo.toml", "Cargo.lock"] {
        println!("cargo:rerun-if-changed={}", folder.join(part).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let target = out.join("hostile-guest");
    let mut build = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"));
    build
        .args([
            "build",
            "--release",
            "--quiet",
            "--locked",
            "--manifest-path",
        ])
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target);
    for name in NOT_FOR_THE_GUEST {
        build.env_remove(name);
    }
    let status = build.status().expect("cargo can be started");
    if !status.success() {
        panic!("The hostile guest does not build: {status}");
    }
    let guest = target.join("release/hostile-guest");
    println!("cargo:rustc-env=HOSTILE_GUEST={}", guest.display());
}
