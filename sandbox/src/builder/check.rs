//! Which options are possible, alone and together.

use vmm::memory::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};
use vmm::mptable::MAX_VCPUS;

use super::{DEFAULT_HOSTNAME, SandboxBuilder};
use crate::error::StartError;

/// Longest host name in bytes (Linux's `__NEW_UTS_LEN`).
const MAX_HOSTNAME_BYTES: usize = 64;

impl SandboxBuilder {
    pub(super) fn check_options(&self) -> Result<(), StartError> {
        let invalid = |sentence: String| Err(StartError::InvalidOption { sentence });
        if !(1..=MAX_VCPUS).contains(&self.cpus) {
            return invalid(format!(
                "{} processors are not possible: 1 to {MAX_VCPUS} are",
                self.cpus
            ));
        }
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return invalid(format!(
                "{} of memory are not possible: {} to {} are",
                size(self.memory_mib),
                size(MIN_MEMORY_MIB),
                size(MAX_MEMORY_MIB)
            ));
        }
        if let Some(template) = &self.template {
            let inputs = &template.manifest().inputs;
            if self.size() != (inputs.cpus, inputs.memory_mib)
                || self.kernel.is_some()
                || self.initrd.is_some()
                || self.rootfs.is_some()
                || self.workspace.is_some()
                || self.scratch_disk_mib.is_some()
            {
                return invalid(format!(
                    "A fork has what its template was built with: {} processors, {} MiB of memory, its images and no \
                     workspace",
                    inputs.cpus, inputs.memory_mib
                ));
            }
        }
        if self.workspace.is_some() && self.scratch_disk_mib.is_some() {
            return invalid(
                "What is written is kept in a workspace or on a scratch disk, not on both"
                    .to_owned(),
            );
        }
        if self.require_cgroup && self.leave_out.contains(jailer::Part::Cgroup) {
            return invalid(
                "A control group is either required or left out of the cell, not both".to_owned(),
            );
        }
        if self.timeout.is_some_and(|timeout| timeout.is_zero()) {
            return invalid(
                "A time of 0 is over before it begins: give none for no end".to_owned(),
            );
        }
        if self.cpu_time.is_some_and(|limit| limit.is_zero()) {
            return invalid(
                "A processor time of 0 is used up before it begins: give none for no bound"
                    .to_owned(),
            );
        }
        if let Some(percent) = self.cpu_quota_percent {
            let most = 100 * (u32::from(self.cpus) + 1);
            if !(1..=most).contains(&percent) {
                return invalid(format!(
                    "A share of {percent} % of a processor is not possible: 1 to {most} % are, for a machine with {} processors",
                    self.cpus
                ));
            }
            if self.leave_out.contains(jailer::Part::Cgroup) {
                return invalid(
                    "A share of the processors is kept by a control group, which is left out of the cell".to_owned(),
                );
            }
        }
        if self.max_processes == Some(0) {
            return invalid(
                "Nothing runs without a process: give none for what goes with the memory"
                    .to_owned(),
            );
        }
        let hostname = self.hostname.as_deref().unwrap_or(DEFAULT_HOSTNAME);
        let name = hostname.as_bytes();
        let is_name = (1..=MAX_HOSTNAME_BYTES).contains(&name.len())
            && name
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
            && name.first() != Some(&b'-')
            && name.last() != Some(&b'-');
        if !is_name {
            return invalid(format!(
                "{hostname:?} is no host name: 1 to {MAX_HOSTNAME_BYTES} letters, digits and hyphens, none of these at an \
                 end"
            ));
        }
        Ok(())
    }
}

/// A size as people say it.
fn size(mib: u32) -> String {
    if mib >= 1024 && mib.is_multiple_of(1024) {
        format!("{} GiB", mib / 1024)
    } else {
        format!("{mib} MiB")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sandbox::Sandbox;

    fn refused(builder: SandboxBuilder) -> String {
        match builder.start().unwrap_err() {
            StartError::InvalidOption { sentence } => sentence,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn processors_outside_the_bounds_are_refused() {
        for cpus in [0, 33, 255] {
            let sentence = refused(Sandbox::builder().cpus(cpus));
            assert!(
                sentence.starts_with(&format!("{cpus} processors")),
                "{sentence}"
            );
        }
    }

    #[test]
    fn memory_outside_the_bounds_is_refused() {
        for memory_mib in [0, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1, u32::MAX] {
            let sentence = refused(Sandbox::builder().memory_mib(memory_mib));
            assert!(sentence.contains("iB of memory"), "{sentence}");
        }
    }

    #[test]
    fn names_that_no_host_can_have_are_refused() {
        for name in ["", "-a", "a-", "a b", "a\0", "ä", "a.b", &"a".repeat(65)] {
            let sentence = refused(Sandbox::builder().hostname(name));
            assert!(sentence.contains("is no host name"), "{sentence}");
        }
    }

    #[test]
    fn a_control_group_that_is_required_and_left_out_is_refused() {
        let builder = Sandbox::builder().require_cgroup(true);

        let sentence = refused(builder.dangerously_leave_out(jailer::Part::Cgroup));

        assert!(
            sentence.contains("either required or left out"),
            "{sentence}"
        );
    }

    #[test]
    fn a_share_of_the_processors_that_none_can_have_is_refused() {
        for percent in [0, 301, u32::MAX] {
            let builder = Sandbox::builder().cpus(2);
            let sentence = refused(builder.cpu_quota_percent(Some(percent)));
            assert!(sentence.contains("1 to 300 % are"), "{sentence}");
        }
        for percent in [1, 300] {
            let builder = Sandbox::builder().cpus(2).cpu_quota_percent(Some(percent));
            builder.check_options().unwrap();
        }
        let builder = Sandbox::builder().cpu_quota_percent(Some(50));
        let sentence = refused(builder.dangerously_leave_out(jailer::Part::Cgroup));
        assert!(sentence.contains("kept by a control group"), "{sentence}");
    }

    #[test]
    fn no_process_at_all_is_refused() {
        let sentence = refused(Sandbox::builder().max_processes(Some(0)));
        assert!(sentence.contains("without a process"), "{sentence}");
    }

    #[test]
    fn no_time_at_all_is_refused() {
        let sentence = refused(Sandbox::builder().timeout(Some(Duration::ZERO)));
        assert!(sentence.contains("over before it begins"), "{sentence}");
    }

    #[test]
    fn options_at_their_bounds_are_taken() {
        for (cpus, memory_mib, name) in [
            (1, MIN_MEMORY_MIB, "a".to_owned()),
            (MAX_VCPUS, MAX_MEMORY_MIB, "A1-".repeat(21) + "z"),
        ] {
            let builder = Sandbox::builder()
                .cpus(cpus)
                .memory_mib(memory_mib)
                .hostname(name);
            builder.check_options().unwrap();
        }
    }
}
