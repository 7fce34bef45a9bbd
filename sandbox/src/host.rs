//! Whether this machine can run virtual machines, in plain words.

/// What was found out about this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostReport {
    /// One check each, in the order in which they matter.
    pub checks: Vec<Check>,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// A short name, for example `KVM`.
    pub name: &'static str,
    /// How it stands.
    pub status: Status,
    /// What was found, in one sentence.
    pub detail: String,
    /// What to do, if something is to be done.
    pub advice: Option<String>,
}

/// How a check stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// As it should be.
    Ok,
    /// Sandboxes run, but with less: slower, or with fewer walls around the machine's process.
    Warning,
    /// Sandboxes cannot run.
    Missing,
}

impl HostReport {
    /// Looks at this machine.
    #[must_use]
    pub fn inspect() -> Self {
        todo!()
    }

    /// Whether sandboxes can run here.
    ///
    /// # Errors
    /// One sentence that says what is missing and what to do; the same that [`crate::SandboxBuilder::start`]
    /// gives.
    pub fn can_run(&self) -> Result<(), String> {
        todo!()
    }
}
