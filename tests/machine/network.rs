//! A network of a test's own, in namespaces that it makes: the KVM host's own is not touched.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const NETWORK: &str = include_str!("egress/network.sh");
const SERVERS: &str = include_str!("egress/servers.py");

/// The network's server of HTTP/2.
pub(crate) const HTTP2: (&str, &str) = ("http2.py", include_str!("egress/http2.py"));

/// Starts it, and waits until it listens.
pub(crate) const START_HTTP2: &str =
    "/usr/bin/python3 http2.py . & http2=$!; trap \"kill $http2\" EXIT
    while [ ! -e http2-up ]; do kill -0 $http2 || exit; sleep 0.1; done";

/// A network, and what has been done in it.
pub(crate) struct Network(TempDir);

impl Network {
    pub(crate) fn new(programs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("network.sh", NETWORK), ("servers.py", SERVERS)]
            .iter()
            .chain(programs)
        {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a shell command in it, in the folder.
    pub(crate) fn run(&self, command: &str) -> Output {
        let output = Command::new("timeout")
            .args(["--signal=KILL", "900", "unshare", "--net", "--mount", "sh"])
            .arg(self.path("network.sh"))
            .arg(self.0.path())
            .args(["sh", "-c", command])
            .output()
            .unwrap();
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Host and path of all requests that reached a server.
    pub(crate) fn received(&self) -> BTreeSet<String> {
        let text = fs::read_to_string(self.path("received")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The names below `example` that the network's name server was asked for.
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        let text = fs::read_to_string(self.path("asked")).unwrap();
        let names = text.lines().filter(|name| name.contains("example"));
        names.map(str::to_owned).collect()
    }

    /// All attempts on record.
    pub(crate) fn records(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("log")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}
