//! What leaves a run and what enters it: the options, the lines for what was denied, the list of `--json`, and the record
//! of all attempts.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandvmm::egress::{MAX_ROOTS_BYTES, Record, Rule, RuleError, Secret, Totals, Verdict};
use sandvmm::{PublishedPort, Sandbox, SandboxBuilder};
use serde::Serialize;

use super::secret::{self, SecretArgError};
use crate::args::{EgressArgs, NetworkArgs};
use crate::{notice, open};

/// Largest file of rules that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Most attempts that did not succeed that are listed and said, each once.
const MAX_LISTED: usize = 100;

/// How long the last attempts may take to be told when the machine is gone.
const SETTLE_LIMIT: Duration = Duration::from_secs(1);

/// Why the options can't be followed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    /// A file that can't be read or written.
    #[error("The file '{}' can't be {action}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was to be done with it.
        action: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A line of a file that is no rule.
    #[error("Line {line} of '{}' is no rule", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Why not.
        #[source]
        source: RuleError,
    },
    /// A file above [`MAX_FILE_BYTES`].
    #[error("The file '{}' is larger than {} MiB", .0.display(), MAX_FILE_BYTES >> 20)]
    TooLarge(PathBuf),
    /// A secret that there is not.
    #[error(transparent)]
    Secret(#[from] SecretArgError),
    /// An address of this host that can't be listened on.
    #[error("The address {address} can't be listened on")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

/// A port of this host that leads to one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Publish {
    address: SocketAddr,
    port: u16,
}

/// `[ADDRESS:]PORT:GUESTPORT`; without an address, this host's loopback.
pub(crate) fn parse_publish(text: &str) -> Result<Publish, String> {
    let expected = || "say ADDRESS:PORT:GUESTPORT or PORT:GUESTPORT".to_owned();
    let no_port = |number: &str| format!("{number} is no port: 1 to {} are", u16::MAX);
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let (outside, port) = text.rsplit_once(':').ok_or_else(expected)?;
    let outside_port = outside.rsplit_once(':').map_or(outside, |(_, port)| port);
    if !is_number(port) || !is_number(outside_port) {
        return Err(expected());
    }
    let port = port
        .parse()
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| no_port(port))?;
    let outside_number = outside_port.parse().map_err(|_| no_port(outside_port))?;
    let address = if outside == outside_port {
        SocketAddr::new([127, 0, 0, 1].into(), outside_number)
    } else {
        outside.parse().map_err(|_| expected())?
    };
    Ok(Publish { address, port })
}

/// `HOST[:PORT[,PORT]]`.
pub(crate) fn parse_rule(text: &str) -> Result<String, String> {
    let rule = text.parse::<Rule>();
    // Clap tells no sources.
    rule.map(|rule| rule.to_string())
        .map_err(|error| notice::sentence(&error))
}

/// What leaves a run and what enters it.
#[derive(Debug)]
pub(crate) struct Network {
    rules: Vec<String>,
    raw_ports: Vec<u16>,
    secrets: Vec<Secret>,
    roots_pem: Vec<u8>,
    /// What listens here, the guest's port, and whether the system chose the one here.
    published: Vec<(TcpListener, u16, bool)>,
    log: Option<File>,
    told: Arc<Mutex<Told>>,
}

/// What did not succeed so far.
#[derive(Debug, Default)]
struct Told {
    listed: Vec<Refused>,
    known: BTreeSet<(String, u16, String)>,
    is_truncated: bool,
}

/// An attempt that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Refused {
    host: String,
    port: u16,
    verdict: Verdict,
    reason: String,
}

/// `egress` of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct NetworkReport {
    allowed: u64,
    denied: u64,
    failed: u64,
    unrecorded: u64,
    bytes_out: u64,
    bytes_in: u64,
    refused: Vec<Refused>,
    refused_truncated: bool,
    published: Vec<PublishedPort>,
}

impl Network {
    /// Reads the files, opens the log and takes the ports.
    ///
    /// # Errors
    /// See [`NetworkError`].
    pub(crate) fn new(args: &NetworkArgs) -> Result<Self, NetworkError> {
        let secrets = args.secret.iter().map(|text| secret::read(text));
        let secrets = secrets.collect::<Result<_, _>>()?;
        let roots_pem = args.egress_ca.as_deref().map(read_roots).transpose()?;
        let published = args.publish.iter().map(|Publish { address, port }| {
            let listener = TcpListener::bind(address).map_err(|source| NetworkError::Listen {
                address: *address,
                source,
            })?;
            Ok::<_, NetworkError>((listener, *port, address.port() == 0))
        });
        Ok(Self {
            secrets,
            roots_pem: roots_pem.unwrap_or_default(),
            published: published.collect::<Result<_, _>>()?,
            ..Self::outwards(&args.egress)?
        })
    }

    /// Where nothing enters, and there are no secrets.
    ///
    /// # Errors
    /// See [`NetworkError`].
    pub(crate) fn outwards(args: &EgressArgs) -> Result<Self, NetworkError> {
        let mut rules = args.allow_host.clone();
        for path in &args.allow_file {
            rules.extend(read_rules(path)?);
        }
        let log = args.egress_log.as_ref().map(|path| {
            let opened = open::to_write(File::options().create(true).append(true), path);
            opened.map_err(|source| NetworkError::File {
                path: path.clone(),
                action: "written",
                source,
            })
        });
        Ok(Self {
            rules,
            raw_ports: args.raw_port.clone(),
            secrets: Vec::new(),
            roots_pem: Vec::new(),
            published: Vec::new(),
            log: log.transpose()?,
            told: Arc::default(),
        })
    }

    /// Whether anything may leave or enter.
    pub(crate) fn is_on(&self) -> bool {
        !self.rules.is_empty() || !self.secrets.is_empty() || !self.published.is_empty()
    }

    /// The variables in which the guest finds placeholders.
    pub(crate) fn secret_names(&self) -> impl Iterator<Item = &str> {
        self.secrets.iter().map(Secret::name)
    }

    /// Sets a sandbox up so. What is denied is said, unless it is to be silent.
    ///
    /// # Errors
    /// When the log can't be written to.
    pub(crate) fn apply(
        &self,
        builder: SandboxBuilder,
        is_silent: bool,
    ) -> Result<SandboxBuilder, std::io::Error> {
        if !self.is_on() {
            return Ok(builder);
        }
        let log = self.log.as_ref().map(File::try_clone).transpose()?;
        let (log, told) = (Mutex::new(log), Arc::clone(&self.told));
        let builder = self
            .rules
            .iter()
            .fold(builder, |builder, rule| builder.allow_host(rule));
        let builder = self.secrets.iter().fold(
            builder.egress_roots(self.roots_pem.clone()),
            |builder, secret| builder.secret(secret.clone()),
        );
        let builder = self
            .raw_ports
            .iter()
            .fold(builder, |builder, port| builder.raw_port(*port))
            .ports_in(!self.published.is_empty());
        Ok(builder.on_egress(move |record| {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            // A full disk does not end the run, whose program has done nothing wrong; it is told once.
            if let Some(error) = log
                .as_mut()
                .and_then(|log| writeln!(log, "{}", record.json()).err())
            {
                *log = None;
                notice::say(&format!(
                    "Connections are no more on record in the file of --egress-log: {error}"
                ));
            }
            drop(log);
            let is_news = told
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(record);
            if is_news && !is_silent {
                notice::say(&record.line());
            }
        }))
    }

    /// Has the sandbox carry what comes to the published ports. Which port the system chose is said, also where a report will come: that is
    /// too late to use it.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub(crate) fn publish(&self, sandbox: &Sandbox, is_quiet: bool) -> std::io::Result<()> {
        for (listener, port, is_chosen) in &self.published {
            sandbox.publish(listener.try_clone()?, *port)?;
            if *is_chosen && !is_quiet {
                let address = listener.local_addr()?;
                notice::say(&format!("{address} leads to port {port} of the guest"));
            }
        }
        Ok(())
    }

    /// Says how many attempts were denied that are not on record, in a sandbox that has ended.
    pub(crate) fn say_unrecorded(&self, sandbox: &Sandbox) {
        if let Some(handle) = sandbox.egress() {
            handle.settle(SETTLE_LIMIT);
            unrecorded(&handle.totals())
                .iter()
                .for_each(|line| notice::say(line));
        }
    }

    /// What left a sandbox that has ended; none where nothing may.
    pub(crate) fn report(&self, sandbox: Option<&Sandbox>) -> Option<NetworkReport> {
        let sandbox = sandbox?;
        let handle = sandbox.egress()?;
        handle.settle(SETTLE_LIMIT);
        let totals = handle.totals();
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        Some(NetworkReport {
            allowed: totals.allowed,
            denied: totals.denied,
            failed: totals.failed,
            unrecorded: totals.unrecorded,
            bytes_out: totals.bytes_out,
            bytes_in: totals.bytes_in,
            refused: told.listed.clone(),
            refused_truncated: told.is_truncated,
            published: sandbox.published(),
        })
    }
}

/// What is said of attempts that nothing else was said of; none where all was.
fn unrecorded(totals: &Totals) -> Option<String> {
    let count = notice::count(totals.unrecorded, "more attempt");
    (totals.unrecorded > 0).then(|| format!("denied: {count} that were not recorded one by one"))
}

impl Told {
    /// Whether it is to be said.
    fn take(&mut self, record: &Record) -> bool {
        let Some(reason) = &record.reason else {
            return false;
        };
        let key = (record.host.clone(), record.port, reason.clone());
        if self.known.contains(&key) {
            return false;
        }
        if self.listed.len() >= MAX_LISTED {
            self.is_truncated = true;
            return false;
        }
        self.known.insert(key);
        self.listed.push(Refused {
            host: record.host.clone(),
            port: record.port,
            verdict: record.verdict,
            reason: reason.clone(),
        });
        true
    }
}

fn read_roots(path: &Path) -> Result<Vec<u8>, NetworkError> {
    let mut pem = Vec::new();
    // What is longer is refused, as such, where it is read.
    open::to_read(path)
        .and_then(|file| file.take(MAX_ROOTS_BYTES as u64 + 1).read_to_end(&mut pem))
        .map_err(|source| NetworkError::File {
            path: path.to_owned(),
            action: "read",
            source,
        })?;
    Ok(pem)
}

/// One rule a line; blank lines and those that begin with `#` are skipped.
fn read_rules(path: &Path) -> Result<Vec<String>, NetworkError> {
    let unreadable = |source| NetworkError::File {
        path: path.to_owned(),
        action: "read",
        source,
    };
    let file = open::to_read(path).map_err(unreadable)?;
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(NetworkError::TooLarge(path.to_owned()));
    }
    let mut rules = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let rule: Rule = line.parse().map_err(|source| NetworkError::Line {
            path: path.to_owned(),
            line: index + 1,
            source,
        })?;
        rules.push(rule.to_string());
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_port_has_an_address_or_is_loopbacks() {
        let of =
            |text: &str| parse_publish(text).map(|found| (found.address.to_string(), found.port));
        assert_eq!(of("8080:80"), Ok(("127.0.0.1:8080".to_owned(), 80)));
        assert_eq!(of("0.0.0.0:8080:80"), Ok(("0.0.0.0:8080".to_owned(), 80)));
        assert_eq!(of("[::1]:8080:80"), Ok(("[::1]:8080".to_owned(), 80)));
        for text in ["", "80", "a:80:80", "8080:0", "8080:x", "99999:80"] {
            assert!(of(text).is_err(), "{text}");
        }
        for (text, wrong) in [
            ("99999:80", "99999"),
            ("8080:0", "0"),
            ("[::1]:70000:1", "70000"),
        ] {
            assert!(
                of(text)
                    .unwrap_err()
                    .starts_with(&format!("{wrong} is no port"))
            );
        }
    }

    #[test]
    fn a_file_has_a_rule_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, "# registries\n\n PyPI.org \nfiles.example:8443\r\n").unwrap();
        assert_eq!(
            read_rules(&path).unwrap(),
            ["pypi.org:443,80", "files.example:8443"]
        );

        std::fs::write(&path, "pypi.org\nhttps://pypi.org\n").unwrap();
        let error = read_rules(&path).unwrap_err();
        assert!(
            matches!(error, NetworkError::Line { line: 2, .. }),
            "{error}"
        );
        std::fs::write(
            &path,
            "#".repeat(usize::try_from(MAX_FILE_BYTES + 1).unwrap()),
        )
        .unwrap();
        assert!(matches!(read_rules(&path), Err(NetworkError::TooLarge(_))));
    }
}
