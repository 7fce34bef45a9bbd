//! The ceilings of a sandbox, by name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A ceiling that was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Limit {
    /// The sandbox's time ([`crate::SandboxBuilder::timeout`]). Kept outside the guest.
    WallTime,
    /// The processor time of the machine's process ([`crate::SandboxBuilder::cpu_time`]). Kept outside the guest.
    CpuTime,
    /// The machine's share of the host's processors ([`crate::SandboxBuilder::cpu_quota_percent`]): it waited for its next one. Kept outside
    /// the guest.
    CpuQuota,
    /// The guest's memory ([`crate::SandboxBuilder::memory_mib`]). The guest kills a process; what it is killed by is kept outside.
    Memory,
    /// The guest's processes ([`crate::SandboxBuilder::max_processes`], or what goes with its memory): a `fork` failed. As the guest says.
    Processes,
    /// The room for what is written: a write failed, or the next one will. As the guest says.
    Disk,
    /// A command's output ([`crate::Command::max_output_bytes`]). Kept outside the guest.
    OutputBytes,
}

impl Limit {
    /// Its name, as in JSON: `cpu_time`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WallTime => "wall_time",
            Self::CpuTime => "cpu_time",
            Self::CpuQuota => "cpu_quota",
            Self::Memory => "memory",
            Self::Processes => "processes",
            Self::Disk => "disk",
            Self::OutputBytes => "output_bytes",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::WallTime => "time",
            Self::CpuTime => "processor time",
            Self::CpuQuota => "share of the processors",
            Self::Memory => "memory",
            Self::Processes => "number of processes",
            Self::Disk => "room for files",
            Self::OutputBytes => "bytes of output",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        for limit in [
            Limit::WallTime,
            Limit::CpuTime,
            Limit::CpuQuota,
            Limit::Memory,
            Limit::Processes,
            Limit::Disk,
            Limit::OutputBytes,
        ] {
            assert_eq!(serde_json::to_value(limit).unwrap(), limit.name());
        }
    }
}
