//! `/init` of the guest; see the library for what it does.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use sandvmm_guest_agent::{boot, calls, gate, stage};

fn main() -> ExitCode {
    let called = std::env::args_os().next().unwrap_or_default();
    if called == stage::NAME {
        return stage::main();
    }
    if called == gate::NAME {
        return gate::main();
    }
    if Path::new(&called).file_name() == Some(calls::client::NAME.as_ref()) {
        return calls::client::main();
    }
    if !rustix::process::getpid().is_init() {
        return ExitCode::from(2);
    }
    boot::run()
}
