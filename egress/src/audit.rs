//! What is told of each attempt.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::policy::{DEFAULT_PORTS, Target};

/// Longest text of the guest's that a record holds, in characters.
const MAX_GUEST_TEXT: usize = 200;

/// A process of the guest, as the guest says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Process {
    /// Its number in the guest.
    pub pid: u32,
    /// Its name, made fit to be shown.
    pub name: String,
}

impl Process {
    /// With what the guest says is its name.
    #[must_use]
    pub fn new(pid: u32, name: &str) -> Self {
        Self {
            pid,
            name: shown(name),
        }
    }
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Verdict {
    /// It was carried.
    Allowed,
    /// It was refused, by a rule's absence or a check.
    Denied,
    /// It was refused by a bound, whatever the rules say.
    Limited,
    /// It was allowed, and the network or the client failed it.
    Failed,
}

/// One attempt, told when it is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Record {
    /// When it began, in milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// Which sandbox.
    pub sandbox: String,
    /// Which process of the guest, as far as the guest says.
    pub process: Option<Process>,
    /// The name, normalised, or the literal address.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The address that was connected to.
    pub address: Option<IpAddr>,
    /// What became of it.
    pub verdict: Verdict,
    /// The rule that allowed it.
    pub rule: Option<String>,
    /// Why it was denied or failed; parts of it may be the guest's words.
    pub reason: Option<String>,
    /// Bytes from the guest to the server.
    pub bytes_out: u64,
    /// Bytes from the server to the guest.
    pub bytes_in: u64,
    /// How long it took.
    pub duration_ms: u64,
    /// Attempts that were denied before this one and have no record: there were too many at once.
    pub unrecorded: u64,
}

impl Record {
    pub(crate) fn new(sandbox: &str, target: &Target, port: u16) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            time_ms: millis(since_epoch.unwrap_or_default()),
            sandbox: sandbox.to_owned(),
            process: None,
            host: match target {
                Target::Name(name) => name.to_string(),
                Target::Address(address) => address.to_string(),
            },
            port,
            address: None,
            verdict: Verdict::Denied,
            rule: None,
            reason: None,
            bytes_out: 0,
            bytes_in: 0,
            duration_ms: 0,
            unrecorded: 0,
        }
    }

    pub(crate) fn because(mut self, verdict: Verdict, reason: &str) -> Self {
        self.verdict = verdict;
        self.reason = Some(shown(reason));
        self
    }

    /// One line of JSON, without its end.
    #[must_use]
    pub fn json(&self) -> String {
        // Strings and numbers alone can't fail to be JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// One line for the user: `denied: pypi.org:443 (not allowed; add --allow-host pypi.org)`.
    #[must_use]
    pub fn line(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Allowed => "allowed",
            Verdict::Denied | Verdict::Limited => "denied",
            Verdict::Failed => "failed",
        };
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        match &self.reason {
            Some(reason) => format!("{verdict}: {host}:{} ({reason})", self.port),
            None => format!("{verdict}: {host}:{}", self.port),
        }
    }
}

/// The rule that allows this, as short as it can be.
pub(crate) fn as_rule(target: &Target, port: u16) -> String {
    match target {
        target if !DEFAULT_PORTS.contains(&port) => format!("{target}:{port}"),
        Target::Address(address) => address.to_string(),
        Target::Name(name) => name.to_string(),
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Text without characters that are invisible, move the cursor or turn the writing direction, and not too long.
fn shown(text: &str) -> String {
    let mut shown = String::new();
    for (count, character) in text.chars().enumerate() {
        if count >= MAX_GUEST_TEXT {
            shown.push('…');
            break;
        }
        if character == ' ' || character.is_ascii_graphic() || character.is_alphanumeric() {
            shown.push(character);
        } else {
            shown.extend(character.escape_unicode());
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::name::HostName;

    fn record(host: &str, port: u16) -> Record {
        let target = match host.parse() {
            Ok(address) => Target::Address(address),
            Err(_) => Target::Name(HostName::parse(host).unwrap()),
        };
        let reason = format!("not allowed; add --allow-host {}", as_rule(&target, port));
        Record::new("sandvmm", &target, port).because(Verdict::Denied, &reason)
    }

    #[test]
    fn a_denial_says_what_to_add() {
        for (host, port, line) in [
            (
                "PyPI.org.",
                443,
                "denied: pypi.org:443 (not allowed; add --allow-host pypi.org)",
            ),
            (
                "pypi.org",
                8443,
                "denied: pypi.org:8443 (not allowed; add --allow-host pypi.org:8443)",
            ),
            (
                "1.1.1.1",
                80,
                "denied: 1.1.1.1:80 (not allowed; add --allow-host 1.1.1.1)",
            ),
            (
                "fd00::1",
                443,
                "denied: [fd00::1]:443 (not allowed; add --allow-host fd00::1)",
            ),
            (
                "fd00::1",
                22,
                "denied: [fd00::1]:22 (not allowed; add --allow-host [fd00::1]:22)",
            ),
        ] {
            assert_eq!(record(host, port).line(), line);
        }
    }

    #[test]
    fn the_object_has_the_documented_fields() {
        let mut record = record("pypi.org", 443);
        record.time_ms = 1;
        record.process = Some(Process::new(7, "py\x1b[31m\u{202e}"));

        assert_eq!(
            record.json(),
            "{\"time_ms\":1,\"sandbox\":\"sandvmm\",\"process\":{\"pid\":7,\"name\":\"py\\\\u{1b}[31m\\\\u{202e}\"},\
             \"host\":\"pypi.org\",\"port\":443,\"address\":null,\"verdict\":\"denied\",\"rule\":null,\
             \"reason\":\"not allowed; add --allow-host pypi.org\",\"bytes_out\":0,\"bytes_in\":0,\"duration_ms\":0,\"unrecorded\":0}"
        );
    }

    proptest! {
        #[test]
        fn any_text_of_the_guests_becomes_one_bounded_line(text in any::<String>()) {
            let process = Process::new(1, &text);
            prop_assert!(process.name.chars().count() <= MAX_GUEST_TEXT * 10 + 1);
            prop_assert!(!process.name.chars().any(char::is_control));
            let hidden = ['\u{202e}', '\u{200b}', '\u{2028}'];
            prop_assert!(!process.name.contains(hidden));
        }
    }
}
