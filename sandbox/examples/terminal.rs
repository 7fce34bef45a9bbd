//! A terminal session that a program holds: `cargo run -p sandvmm --example terminal`.

use std::error::Error;
use std::io::{Read, Write};
use std::time::Duration;

use sandvmm::{Outcome, Sandbox};

fn main() -> Result<(), Box<dyn Error>> {
    sandvmm::init();
    let (screen, outcome) = run()?;
    println!("{screen}\n{outcome:?}");
    Ok(())
}

/// Types, resizes, interrupts; what was shown, and how it ended.
pub(crate) fn run() -> Result<(String, Outcome), Box<dyn Error>> {
    let sandbox = Sandbox::builder()
        .timeout(Some(Duration::from_secs(240)))
        .start()?;
    let mut child = sandbox
        .command("sh")
        .env("PS1", "prompt> ")
        .pty(80, 24)
        .spawn()?;
    let mut terminal = child.terminal.take().ok_or("It has a terminal")?;
    let mut screen = String::new();
    read_until(&mut terminal, &mut screen, "prompt> ")?;
    terminal.write_all(b"stty size\n")?;
    read_until(&mut terminal, &mut screen, "24 80")?;
    read_until(&mut terminal, &mut screen, "prompt> ")?;
    child.resize(100, 40)?;
    // It goes another way than what is typed.
    terminal.write_all(b"until stty size | grep -x '40 100'; do sleep 0.1; done\n")?;
    read_until(&mut terminal, &mut screen, "\n40 100")?;
    read_until(&mut terminal, &mut screen, "prompt> ")?;
    terminal.write_all(b"sleep 1000\n")?;
    read_until(&mut terminal, &mut screen, "sleep 1000")?;
    // Ctrl-C, then the end of what is typed.
    std::thread::sleep(Duration::from_secs(2));
    terminal.write_all(b"\x03")?;
    read_until(&mut terminal, &mut screen, "prompt> ")?;
    terminal.write_all(b"exit 3\n")?;
    terminal.read_to_string(&mut screen)?;
    Ok((screen, child.wait().outcome))
}

fn read_until(from: &mut impl Read, screen: &mut String, text: &str) -> Result<(), Box<dyn Error>> {
    let seen = screen.len();
    let mut byte = [0];
    while !screen.get(seen..).unwrap_or_default().ends_with(text) {
        from.read_exact(&mut byte)?;
        screen.push_str(&String::from_utf8_lossy(&byte));
    }
    Ok(())
}
