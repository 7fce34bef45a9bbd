//! A workspace over three runs: `cargo run -p sandvmm --example workspace -- NAME`.

use std::error::Error;
use std::time::Duration;

use sandvmm::{Sandbox, Workspace};

fn main() -> Result<(), Box<dyn Error>> {
    sandvmm::init();
    let name = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "example".to_owned());
    for line in run(&name)? {
        println!("{line}");
    }
    Ok(())
}

/// Three sandboxes, one after the other, on one disk: what the log has at each one's end.
pub(crate) fn run(name: &str) -> Result<Vec<String>, Box<dyn Error>> {
    let mut seen = Vec::new();
    for number in 1..=3 {
        let sandbox = Sandbox::builder()
            .workspace(Workspace::open_or_create(name, 64)?)
            .timeout(Some(Duration::from_secs(240)))
            .start()?;
        let script = format!("echo run {number} >> log; tr '\\n' ' ' < log");
        let output = sandbox.command("sh").arg("-c").arg(script).output()?;
        seen.push(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Ok(seen)
}
