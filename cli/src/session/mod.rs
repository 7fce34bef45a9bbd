//! Sandboxes that outlive a command: `start`, `exec`, `shell`, `cp`, `ps`, `kill`, `logs`, `stop`, `ls`, `pause`, `resume`.

pub(crate) mod args;
mod exec;
mod logs;
mod start;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sandvmm::session::{Session, SessionCopied, SessionError, SessionInfo};
use sandvmm::{PauseError, PausedSandbox, Sandbox, TemplateError};
use serde_json::json;

use crate::escape::escape;
use crate::run::copies::tell_left_out;
use crate::run::verdict::{FAILED, USAGE};
use crate::{notice, output};
use args::{CpArgs, KillArgs, LsArgs, PsArgs, SessionArgs, StopArgs};

pub(crate) use exec::{exec, shell};
pub(crate) use logs::logs;
pub(crate) use start::{resume, start};

/// The state of a sandbox that is on disk.
const PAUSED: &str = "paused";

/// Says why something could not be done, and gives the exit code.
fn failed(error: &SessionError) -> u8 {
    notice::say(&notice::sentence(error));
    match error {
        SessionError::Name { .. } => USAGE,
        _ => FAILED,
    }
}

/// Prints what there is to print, or why there is nothing.
fn conclude(text: Result<String, SessionError>) -> u8 {
    match text {
        Ok(text) => output::print(&text, 0),
        Err(error) => failed(&error),
    }
}

/// Copies in or out.
pub(crate) fn cp(args: &CpArgs) -> u8 {
    let user = args.user.as_deref();
    let copied = match (in_session(&args.from), in_session(&args.to)) {
        (None, Some((name, to))) => {
            Session::open(name).and_then(|session| session.copy_in(Path::new(&args.from), to, user))
        }
        (Some((name, from)), None) => Session::open(name)
            .and_then(|session| session.copy_out(from, Path::new(&args.to), user)),
        _ => {
            notice::say(&no_copy(&args.from, &args.to));
            return USAGE;
        }
    };
    match copied {
        Ok(SessionCopied {
            left_out, first, ..
        }) => {
            if left_out > 0 && !args.quiet {
                tell_left_out(left_out, &first.display().to_string());
            }
            0
        }
        Err(error) => failed(&error),
    }
}

/// `NAME:PATH`; a word with a slash before its first colon is a path of the host.
fn in_session(word: &OsStr) -> Option<(&str, &Path)> {
    let bytes = word.as_bytes();
    let colon = bytes.iter().position(|byte| *byte == b':')?;
    let name = std::str::from_utf8(bytes.get(..colon)?).ok()?;
    let path = bytes.get(colon + 1..)?;
    if name.is_empty() || name.contains('/') || path.is_empty() {
        return None;
    }
    Some((name, Path::new(OsStr::from_bytes(path))))
}

/// Why two words are no copy.
fn no_copy(from: &OsStr, to: &OsStr) -> String {
    let pathless = [from, to].into_iter().find(|word| {
        let name = word.as_bytes().strip_suffix(b":");
        name.is_some_and(|name| !name.is_empty() && !name.contains(&b'/') && !name.contains(&b':'))
    });
    if let Some(word) = pathless {
        let word = word.display();
        return format!(
            "'{word}' names no path in the sandbox: say {word}NAME for a copy in its user's home, or {word}/PATH"
        );
    }
    let (from, to, is_sandbox) = (from.display(), to.display(), in_session(from).is_some());
    let which = if is_sandbox { "both are" } else { "none is" };
    format!(
        "Of '{from}' and '{to}' {which} in a sandbox: one must be NAME:PATH, and the other a path here; write ./a:b for a \
         file with a colon in its name"
    )
}

/// Shows the commands that run.
pub(crate) fn ps(args: &PsArgs) -> u8 {
    let commands = Session::open(&args.name).and_then(|session| session.commands());
    conclude(commands.map(|commands| {
        let mut text = String::new();
        for command in commands {
            let words: Vec<_> = command
                .words
                .iter()
                .map(|word| word.to_string_lossy())
                .collect();
            // A string takes all that is written to it.
            let _ = if args.json {
                let object = json!({
                    "id": command.id, "words": words, "age_s": command.age.as_secs_f64(),
                    "is_detached": command.is_detached,
                });
                writeln!(text, "{object}")
            } else {
                let detached = if command.is_detached {
                    "detached"
                } else {
                    "attached"
                };
                let (id, age) = (command.id, age(command.age));
                writeln!(
                    text,
                    "{id}\t{age}\t{detached}\t{}",
                    escape(&words.join(" "))
                )
            };
        }
        text
    }))
}

/// Ends a command, and waits for its end.
pub(crate) fn kill(args: &KillArgs) -> u8 {
    let told = Session::open(&args.name).and_then(|session| session.signal(args.id, args.signal));
    conclude(told.map(|()| String::new()))
}

/// Ends sessions. Of a name that none has, the paused sandbox is removed; all of a user's are those that run.
pub(crate) fn stop(args: &StopArgs) -> u8 {
    let names = if args.all {
        match Session::list() {
            Ok(found) => listed(found).map(|info| info.name).collect(),
            Err(error) => return failed(&error),
        }
    } else {
        args.names.clone()
    };
    let mut code = 0;
    for name in names {
        match Session::open(&name).and_then(Session::stop) {
            Ok(()) => {}
            // It has ended by itself meanwhile.
            Err(SessionError::Missing { .. }) if args.all => {}
            Err(missing @ SessionError::Missing { .. }) => match Sandbox::remove_paused(&name) {
                Ok(()) => {}
                Err(PauseError::Missing { .. }) => code = failed(&missing),
                Err(error) => code = paused_failed(&error),
            },
            Err(error) => code = failed(&error),
        }
    }
    code
}

fn paused_failed(error: &PauseError) -> u8 {
    notice::say(&notice::sentence(error));
    FAILED
}

/// Puts a session on disk.
pub(crate) fn pause(args: &SessionArgs) -> u8 {
    let paused = Session::open(&args.name).and_then(|session| session.pause(&args.name));
    conclude(paused.map(|()| String::new()))
}

/// The sessions of a list; what is none of its folder is said.
fn listed(found: Vec<Result<SessionInfo, SessionError>>) -> impl Iterator<Item = SessionInfo> {
    found.into_iter().filter_map(|found| {
        found
            .inspect_err(|odd| notice::say(&notice::sentence(odd)))
            .ok()
    })
}

/// Shows all sessions, and the sandboxes that are paused.
pub(crate) fn ls(args: &LsArgs) -> u8 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_s = now.unwrap_or_default().as_secs();
    // In this order one that is being paused is seen: it is on disk before it is no session any more.
    let sessions: Vec<SessionInfo> = match Session::list() {
        Ok(found) => listed(found).collect(),
        Err(error) => return failed(&error),
    };
    let (paused, code) = match Sandbox::list_paused() {
        Ok(found) => (found, 0),
        // Without a data folder there is none.
        Err(PauseError::Saved(TemplateError::Images(_))) => (Vec::new(), 0),
        Err(error) => (Vec::new(), paused_failed(&error)),
    };
    let mut lines = BTreeMap::new();
    for one in &paused {
        let line = if args.json {
            paused_as_json(one)
        } else {
            paused_as_line(one, now_s)
        };
        lines.insert(&one.name, line);
    }
    // What is going on and is on disk still is on its way.
    for info in &sessions {
        let line = if args.json {
            as_json(info)
        } else {
            as_line(info, now_s)
        };
        lines.insert(&info.name, line);
    }
    output::print(&lines.into_values().collect::<String>(), code)
}

fn paused_as_json(paused: &PausedSandbox) -> String {
    let known = |number: u32| (number > 0).then_some(number);
    let object = json!({
        "name": paused.name, "state": PAUSED, "is_ready": false, "pid": null,
        "paused_unix_s": paused.paused_unix_s, "cpus": known(paused.cpus.into()),
        "memory_mib": known(paused.memory_mib), "disk_bytes": paused.disk_bytes,
    });
    format!("{object}\n")
}

fn paused_as_line(paused: &PausedSandbox, now_s: u64) -> String {
    let since = age(Duration::from_secs(
        now_s.saturating_sub(paused.paused_unix_s),
    ));
    let (name, cpus, memory) = (&paused.name, paused.cpus, paused.memory_mib);
    if cpus == 0 {
        return format!("{name}\t{PAUSED}\t-\t-\t{since}\n");
    }
    let cpus = notice::count(u64::from(cpus), "CPU");
    format!("{name}\t{PAUSED}\t{cpus}\t{memory}M\t{since}\n")
}

fn state(info: &SessionInfo) -> &'static str {
    if info.is_ready { "ready" } else { "starting" }
}

fn as_json(info: &SessionInfo) -> String {
    let seconds = |limit: Option<Duration>| limit.map(|limit| limit.as_secs_f64());
    let object = json!({
        "name": info.name, "state": state(info), "is_ready": info.is_ready, "pid": info.pid,
        "started_unix_s": info.started_unix_s, "cpus": info.cpus, "memory_mib": info.memory_mib,
        "idle_s": seconds(info.idle), "timeout_s": seconds(info.timeout), "published": info.published,
    });
    format!("{object}\n")
}

fn as_line(info: &SessionInfo, now_s: u64) -> String {
    let up = age(Duration::from_secs(
        now_s.saturating_sub(info.started_unix_s),
    ));
    let (name, state) = (&info.name, state(info));
    if !info.is_ready {
        return format!("{name}\t{state}\t-\t-\t{up}\n");
    }
    let (cpus, memory) = (info.cpus, info.memory_mib);
    let cpus = notice::count(u64::from(cpus), "CPU");
    let mut line = format!("{name}\t{state}\t{cpus}\t{memory}M\t{up}");
    for (index, port) in info.published.iter().enumerate() {
        let before = if index == 0 { '\t' } else { ' ' };
        // Writing to a String does not fail.
        let _ = write!(line, "{before}{}->{}", port.address, port.guest_port);
    }
    line.push('\n');
    line
}

/// A duration in its two largest units.
fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_of_the_session_unless_a_slash_comes_before_the_colon() {
        let word = |word| in_session(OsStr::new(word));

        assert_eq!(word("dev:a"), Some(("dev", Path::new("a"))));
        assert_eq!(word("dev:/a:b"), Some(("dev", Path::new("/a:b"))));
        for host in ["a", "./dev:a", "/x/dev:a", ":a", "dev:", ""] {
            assert_eq!(word(host), None, "{host}");
        }
    }

    #[test]
    fn what_is_no_copy_is_told_why() {
        let said = |from, to| no_copy(OsStr::new(from), OsStr::new(to));

        for (from, to) in [("a", "dev:"), ("dev:", "a"), ("dev:", "x:a")] {
            let said = said(from, to);
            assert!(said.starts_with("'dev:' names no path"), "{said}");
            assert!(said.contains("say dev:NAME"), "{said}");
        }
        assert!(said("a", "b").starts_with("Of 'a' and 'b' none is in"));
        assert!(said("a", "./b:").starts_with("Of 'a' and './b:' none is"));
        assert!(said("x:a", "y:b").starts_with("Of 'x:a' and 'y:b' both are"));
    }

    #[test]
    fn one_processor_is_one() {
        let line = |cpus| {
            let mut info = SessionInfo::default();
            (info.cpus, info.is_ready) = (cpus, true);
            as_line(&info, 0)
        };

        assert!(line(1).contains("\t1 CPU\t"), "{}", line(1));
        assert!(line(2).contains("\t2 CPUs\t"), "{}", line(2));
    }

    #[test]
    fn published_ports_are_listed() {
        let port = json!([{"address": "127.0.0.1:8080", "guest_port": 80}]);
        let mut info = SessionInfo::default();
        (info.cpus, info.is_ready) = (1, true);
        let without = as_line(&info, 0);

        info.published = serde_json::from_value(port.clone()).unwrap();

        let end = "\t127.0.0.1:8080->80\n";
        assert_eq!(as_line(&info, 0), without.trim_end().to_owned() + end);
        let object: serde_json::Value = serde_json::from_str(&as_json(&info)).unwrap();
        assert_eq!(object["published"], port);
    }

    #[test]
    fn ages_have_two_units() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3_661, "1h1m"),
            (90_000, "1d1h"),
        ] {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
    }
}
