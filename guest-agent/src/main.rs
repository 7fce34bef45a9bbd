//! `/init` of the guest; see the library for what it does.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use sandvmm_guest_agent::{boot, stage};

fn main() -> ExitCode {
    if std::env::args_os()
        .next()
        .is_some_and(|name| name == stage::NAME)
    {
        return stage::main();
    }
    if !rustix::process::getpid().is_init() {
        return ExitCode::from(2);
    }
    boot::run()
}
