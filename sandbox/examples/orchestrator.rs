//! Fifty snippets of code that nobody has read, on four sandboxes at once: `cargo run -p sandvmm --example orchestrator`.
//!
//! Each snippet gets a sandbox of its own, four at a time; what goes wrong with one is its own result.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Mutex;
use std::time::Duration;

use sandvmm::{Outcome, Sandbox};

/// Sandboxes at one time.
const SANDBOXES: usize = 4;

/// What a snippet came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It ended well, and printed this.
    Printed(String),
    /// It ended otherwise: its own doing.
    Failed(Outcome),
    /// Nothing of it ran, or its end is not known: may be tried again.
    Retry(String),
}

fn main() -> Result<(), Box<dyn Error>> {
    sandvmm::init();
    let snippets: Vec<String> = (0..50).map(snippet).collect();
    for (number, verdict) in run(&snippets) {
        println!("{number:2}: {verdict:?}");
    }
    Ok(())
}

/// What a language model may have written.
pub(crate) fn snippet(number: usize) -> String {
    match number % 5 {
        0 => format!("print(sum(range({number})))"),
        1 => format!("import json; print(json.dumps({{'number': {number}}}))"),
        2 => format!("import sys; sys.exit({number})"),
        3 => "1 / 0".to_owned(),
        _ => format!("open('file', 'w').write('{number}'); print(open('file').read())"),
    }
}

/// Runs all of them, and gives what each came to, by its place.
pub(crate) fn run(snippets: &[String]) -> BTreeMap<usize, Verdict> {
    let queue = Mutex::new(snippets.iter().enumerate());
    let verdicts = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..SANDBOXES {
            scope.spawn(|| {
                while let Some((number, code)) = next(&queue) {
                    let verdict =
                        judge(code).unwrap_or_else(|error| Verdict::Retry(error.to_string()));
                    if let Ok(mut verdicts) = verdicts.lock() {
                        verdicts.insert(number, verdict);
                    }
                }
            });
        }
    });
    verdicts.into_inner().unwrap_or_default()
}

fn next<T>(queue: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    queue.lock().ok()?.next()
}

fn judge(code: &str) -> Result<Verdict, Box<dyn Error>> {
    let sandbox = Sandbox::builder()
        .memory_mib(128)
        .timeout(Some(Duration::from_secs(120)))
        .start()?;
    let output = sandbox
        .command("python3")
        .arg("-c")
        .arg(code)
        .output_limit(1 << 20)
        .output()?;
    Ok(match output.completion.outcome {
        Outcome::Exited(0) => {
            Verdict::Printed(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        outcome => Verdict::Failed(outcome),
    })
}
