//! What a template is made from, on record.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The manifest's own version.
pub(super) const FORMAT: u32 = 1;

/// Largest manifest in bytes: commands and code to warm with are in it.
pub(super) const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// A file that a template depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct InputFile {
    /// Where it was, absolute.
    pub path: PathBuf,
    /// SHA-256 of its content, in hexadecimal digits.
    pub sha256: String,
}

/// A file that was copied into the guest, or a folder with all that is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Copied {
    /// Where it was, absolute; not known of templates of a former version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
    /// The copy's path in the guest, as it was asked for.
    pub guest_path: PathBuf,
    /// Whether it is a folder.
    #[serde(default)]
    pub is_folder: bool,
    /// SHA-256 over names, modes, links and bytes, in hexadecimal digits.
    pub sha256: String,
}

/// Everything that decides what is in a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Inputs {
    /// The guest kernel.
    pub kernel: InputFile,
    /// The initramfs with the agent.
    pub initramfs: InputFile,
    /// The root image.
    pub rootfs: InputFile,
    /// Virtual processors.
    pub cpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// What was copied in, in order.
    pub copies: Vec<Copied>,
    /// Shell commands that were run, in order, after the copies.
    pub commands: Vec<String>,
    /// Python code that the warm interpreter has run; none without one.
    pub warm: Option<String>,
    /// Whether the template was taken from a sandbox in use: then what ran in it is not known, and it can't be built again.
    pub from_running: bool,
}

impl Inputs {
    /// One number for all of it but the paths: the same for the same inputs, wherever they are.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        let mut field = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        for file in [&self.kernel, &self.initramfs, &self.rootfs] {
            field(file.sha256.as_bytes());
        }
        field(&[self.cpus]);
        field(&self.memory_mib.to_le_bytes());
        field(&(self.copies.len() as u64).to_le_bytes());
        for copy in &self.copies {
            field(copy.guest_path.as_os_str().as_encoded_bytes());
            field(copy.sha256.as_bytes());
        }
        field(&(self.commands.len() as u64).to_le_bytes());
        for command in &self.commands {
            field(command.as_bytes());
        }
        field(&[u8::from(self.warm.is_some())]);
        field(self.warm.as_deref().unwrap_or_default().as_bytes());
        field(&[u8::from(self.from_running)]);
        hex(&digest.finalize())
    }
}

/// One of a template's own files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct OwnFile {
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its content, in hexadecimal digits.
    pub sha256: String,
}

/// A template on record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Manifest {
    /// The manifest's version.
    pub format: u32,
    /// The version of sandvmm that built it.
    pub sandvmm: String,
    /// When, in seconds since the Unix epoch.
    pub built_at_s: u64,
    /// What from.
    pub inputs: Inputs,
    /// [`Inputs::digest`].
    pub inputs_digest: String,
    /// Whether secrets were in the environment of what was run while it was built.
    pub built_with_secrets: bool,
    /// The guest's memory.
    pub memory: OwnFile,
    /// Bytes of it that are not zeros, in pages.
    pub memory_used_bytes: u64,
    /// Everything else of the machine.
    pub state: OwnFile,
    /// Which pages of the memory a fork writes to at once; of a template that was built, not of a sandbox in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<OwnFile>,
    /// The host name of a sandbox that was paused, which it keeps; forks of a template get their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Inputs of no real template.
    pub(in crate::template) fn inputs() -> Inputs {
        let file = |name: &str| InputFile {
            path: PathBuf::from("/").join(name),
            sha256: hex(name.as_bytes()),
        };
        Inputs {
            kernel: file("kernel"),
            initramfs: file("initramfs"),
            rootfs: file("rootfs"),
            cpus: 1,
            memory_mib: 128,
            copies: vec![Copied {
                host_path: None,
                guest_path: "/a".into(),
                is_folder: false,
                sha256: "00".into(),
            }],
            commands: vec!["true".into()],
            warm: Some("import json".into()),
            from_running: false,
        }
    }

    #[test]
    fn the_digest_is_of_everything_but_the_paths() {
        let digest = inputs().digest();
        let changes: [fn(&mut Inputs); 12] = [
            |inputs| inputs.kernel.sha256.push('0'),
            |inputs| inputs.initramfs.sha256.push('0'),
            |inputs| inputs.rootfs.sha256.push('0'),
            |inputs| inputs.cpus = 2,
            |inputs| inputs.memory_mib = 256,
            |inputs| inputs.copies.clear(),
            |inputs| inputs.copies[0].guest_path = "/b".into(),
            |inputs| inputs.copies[0].sha256.push('0'),
            |inputs| inputs.commands.push(String::new()),
            |inputs| inputs.warm = None,
            |inputs| inputs.warm = Some(String::new()),
            |inputs| inputs.from_running = true,
        ];
        let mut seen = vec![digest.clone()];
        for change in changes {
            let mut inputs = inputs();
            change(&mut inputs);
            assert!(!seen.contains(&inputs.digest()));
            seen.push(inputs.digest());
        }
        let mut moved = inputs();
        moved.kernel.path = "/elsewhere".into();
        moved.copies[0].host_path = Some("/elsewhere".into());
        assert_eq!(moved.digest(), digest);
    }

    #[test]
    fn text_of_one_field_does_not_count_for_the_next() {
        let digest = |commands: &[&str]| {
            let commands = commands.iter().map(|text| (*text).to_owned()).collect();
            Inputs {
                commands,
                ..inputs()
            }
            .digest()
        };
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
    }
}
