//! Snapshots and forks, from the supervisor's side.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use sandvmm_vmm::control::{DiskConfig, FromMachine, RestoreConfig, Taken, Then, ToMachine};

use crate::guest::{Started, file};

/// Both files of a snapshot.
pub(crate) struct Snapshot {
    pub(crate) state: OwnedFd,
    pub(crate) memory: OwnedFd,
    pub(crate) taken: Taken,
}

/// What a fork is given.
pub(crate) struct Fork<'a> {
    snapshot: &'a Snapshot,
    config: RestoreConfig,
    console: Option<OwnedFd>,
    disks: Vec<OwnedFd>,
}

impl Started {
    /// Takes a snapshot of a machine with so much memory.
    pub(crate) fn snapshot(&self, kvm: &OwnedFd, memory_mib: u64, then: Then) -> Snapshot {
        let (state, memory) = (file(&[]), file(&[]));
        File::from(memory.try_clone().unwrap())
            .set_len(memory_mib << 20)
            .unwrap();
        self.socket
            .send(
                &ToMachine::Snapshot { then },
                &[kvm.as_fd(), state.as_fd(), memory.as_fd()],
            )
            .unwrap();
        match self.next().0 {
            FromMachine::SnapshotTaken(taken) => Snapshot {
                state,
                memory,
                taken,
            },
            other => panic!("{other:?}"),
        }
    }
}

impl Snapshot {
    pub(crate) fn fork(&self) -> Fork<'_> {
        Fork {
            snapshot: self,
            config: RestoreConfig {
                has_console: false,
                disks: Vec::new(),
                check_host: true,
                has_working_set: false,
            },
            console: None,
            disks: Vec::new(),
        }
    }

    /// The state file's content.
    pub(crate) fn state_bytes(&self) -> Vec<u8> {
        content(&self.state)
    }

    /// The memory file's content.
    pub(crate) fn memory_bytes(&self) -> Vec<u8> {
        content(&self.memory)
    }

    /// The same with another state file.
    pub(crate) fn with_state(&self, bytes: &[u8]) -> Self {
        Self {
            state: file(bytes),
            memory: self.memory.try_clone().unwrap(),
            taken: self.taken,
        }
    }
}

fn content(descriptor: &OwnedFd) -> Vec<u8> {
    let file = File::from(descriptor.try_clone().unwrap());
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

impl Fork<'_> {
    pub(crate) fn console(mut self, console: OwnedFd) -> Self {
        self.config.has_console = true;
        self.console = Some(console);
        self
    }

    pub(crate) fn disk(mut self, disk: OwnedFd, read_only: bool) -> Self {
        self.config.disks.push(DiskConfig {
            read_only,
            serial: "disk".into(),
        });
        self.disks.push(disk);
        self
    }

    pub(crate) fn start(self, kvm: &OwnedFd) -> Started {
        let mut descriptors = vec![
            kvm.as_fd(),
            self.snapshot.state.as_fd(),
            self.snapshot.memory.as_fd(),
        ];
        descriptors.extend(self.console.iter().map(AsFd::as_fd));
        descriptors.extend(self.disks.iter().map(AsFd::as_fd));
        Started::new(&ToMachine::Restore(self.config), &descriptors)
    }
}

/// A console whose lines are numbers.
pub(crate) struct Numbers(BufReader<File>);

impl Numbers {
    /// The test's end, and the machine's.
    pub(crate) fn new() -> (Self, OwnedFd) {
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        (Self(BufReader::new(ours.into())), theirs)
    }

    /// The next line, whatever is on it.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The next line, which must be a whole number.
    pub(crate) fn number(&mut self) -> u64 {
        let line = self.line();
        assert_eq!(line.len(), 8, "{line:?}");
        u64::from_str_radix(&line, 16).unwrap()
    }

    /// Numbers that follow each other, beginning with this line's.
    pub(crate) fn expect_from(&mut self, first: u64, count: u64) {
        for number in first..first + count {
            assert_eq!(self.number(), number);
        }
    }
}
