//! Forks: on time, with streams of their own, many at once, from a pool, and put on disk.

mod many;
mod pause;
mod pool;
mod stopped;
mod time;
mod traffic;

use std::io::Read;
use std::time::Duration;

use sandvmm::{Command, Outcome, Sandbox, Stdio, Template};

/// Memory of these machines in MiB.
const MEMORY_MIB: u32 = 128;

/// A template of the real data folder that goes with the test.
struct Named(Template);

impl Named {
    fn of(sandbox: &Sandbox, name: &str) -> Self {
        let name = format!("test-{name}-{}", std::process::id());
        Self(sandbox.snapshot(&name).unwrap())
    }

    fn fork(&self) -> Sandbox {
        self.0.fork().unwrap()
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let name = self.0.folder().file_name().unwrap().to_str().unwrap();
        Template::remove(name).unwrap();
    }
}

/// After this a machine counts as hung.
const HUNG_AFTER: Duration = Duration::from_secs(600);

fn machine() -> Sandbox {
    let builder = Sandbox::builder().memory_mib(MEMORY_MIB);
    builder.timeout(Some(HUNG_AFTER)).start().unwrap()
}

/// One with a warm interpreter.
fn warmed(code: &str) -> Sandbox {
    let sandbox = machine();
    let output = sandbox.warm_up(code).output().unwrap();
    assert_eq!(output.completion.outcome, Outcome::Exited(0), "{output:?}");
    sandbox
}

fn python(sandbox: &Sandbox, code: &str) -> Command {
    let mut command = sandbox.command("python3");
    command.args(["-c", code]);
    command
}

/// What a command writes that ends with 0. Of a sandbox without a limit, a command that hangs is waited for no longer than
/// [`HUNG_AFTER`]; it writes little.
fn text(command: &mut Command) -> String {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let completion = child.wait_timeout(HUNG_AFTER).expect("the command hangs");
    let [stdout, stderr] = [
        read(child.stdout.take().unwrap()),
        read(child.stderr.take().unwrap()),
    ];
    assert_eq!(completion.outcome, Outcome::Exited(0), "{stdout}{stderr}");
    stdout
}

fn read(mut stream: impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn shell(sandbox: &Sandbox, script: &str) -> String {
    text(sandbox.command("sh").args(["-c", script]))
}
