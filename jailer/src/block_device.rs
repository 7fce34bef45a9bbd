//! Which block device a disk lies on: what `io.max` bounds (`Documentation/admin-guide/cgroup-v2.rst` of Linux, "IO Interface Files").

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::fs::{FileType, fstat, major, minor};

/// A whole block device, by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDevice {
    major: u32,
    minor: u32,
}

impl BlockDevice {
    /// The device that a descriptor is, or whose file system its file is in; `None` where there is none that could be bounded: a file in
    /// memory, on a network, or in a file system over several devices (overlay, btrfs).
    #[must_use]
    pub fn below(disk: BorrowedFd<'_>) -> Option<Self> {
        let stat = fstat(disk).ok()?;
        let number = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => stat.st_rdev,
            FileType::RegularFile => stat.st_dev,
            _ => return None,
        };
        // 0 is the major number of what is no device.
        Some((major(number), minor(number)))
            .filter(|(major, _)| *major != 0)
            .and_then(|(major, minor)| Self::whole(major, minor))
    }

    /// The device itself, or that which it is a partition of: bounds are for whole devices.
    fn whole(major: u32, minor: u32) -> Option<Self> {
        let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        if !fs::exists(folder.join("partition")).ok()? {
            return Some(Self { major, minor });
        }
        // A partition's folder is in its device's.
        let numbers = fs::read_to_string(folder.join("../dev")).ok()?;
        let (major, minor) = numbers.trim().split_once(':')?;
        Some(Self {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

impl std::fmt::Display for BlockDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_lies_on_no_device_has_none() {
        let memory = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let proc = File::open("/proc/self/stat").unwrap();

        for descriptor in [memory.as_fd(), pipe.as_fd(), proc.as_fd()] {
            assert_eq!(BlockDevice::below(descriptor), None);
        }
    }

    #[test]
    fn a_file_on_a_partition_lies_on_the_whole_device() {
        // Every partition of this machine, if it has any.
        for entry in fs::read_dir("/sys/dev/block").unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let (major, minor) = name.split_once(':').unwrap();
            let (major, minor) = (major.parse().unwrap(), minor.parse().unwrap());

            let whole = BlockDevice::whole(major, minor).unwrap();

            let is_partition = fs::exists(entry.path().join("partition")).unwrap();
            assert_eq!(whole != BlockDevice { major, minor }, is_partition);
            let folder = PathBuf::from(format!("/sys/dev/block/{whole}"));
            assert!(!fs::exists(folder.join("partition")).unwrap());
        }
    }
}
