//! A sandbox that is put on disk goes on as it was.

use sandvmm::{PauseError, Sandbox};

use super::{machine, shell};

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_name_is_taken_once_and_a_sandbox_that_was_put_on_disk_is_over() {
    let name = format!("test-taken-{}", std::process::id());
    let (first, second) = (machine(), machine());
    first.pause(&name).unwrap();

    let error = second.pause(&name).unwrap_err();

    assert!(matches!(error, PauseError::Exists { .. }), "{error:?}");
    assert_eq!(shell(&second, "echo lives"), "lives\n");
    first.command("true").spawn().unwrap_err();
    Sandbox::resume(&name).unwrap();
}
