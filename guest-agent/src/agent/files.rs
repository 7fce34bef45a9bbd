//! The stages that work on files: started for a stream of the host's, and ended when it has closed that and they do not end by themselves.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use protocol::file::FileRequest;
use protocol::frame::{self, MAX_FROM_AGENT_BYTES};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, Signal};

use super::{Agent, path_bytes, set_blocking};
use crate::files;
use crate::limits::{FILE_END_WAIT, MAX_FILE_STAGES};
use crate::poll::Token;
use crate::spawn::Stage;
use crate::stage::Order;

/// A process that works on a file.
#[derive(Debug)]
pub(super) struct FileStage {
    pid: Pid,
    /// A second owner of its stream, to see the host close it.
    stream: OwnedFd,
    /// When it is ended, once the host has closed its stream.
    deadline: Option<Instant>,
}

impl Agent {
    pub(super) fn serve_file(&mut self, request: FileRequest, stream: OwnedFd) {
        let sentence = if !self.configured {
            "No file is touched before the guest is configured".to_owned()
        } else if self.file_stages.len() >= MAX_FILE_STAGES {
            "The guest is busy with as many files as the agent allows".to_owned()
        } else {
            match self.start_file_stage(request, &stream) {
                Ok(pid) => return self.keep_file_stage(pid, stream),
                Err(error) => format!("The guest has no room to work on a file: {error}"),
            }
        };
        if let Ok(bytes) = frame::encode(&files::refusal(sentence), MAX_FROM_AGENT_BYTES) {
            // The stream is new, so that its buffer takes the answer; else the close is the answer.
            let _ = rustix::io::write(stream, &bytes);
        }
    }

    fn start_file_stage(&mut self, request: FileRequest, stream: &OwnedFd) -> io::Result<Pid> {
        set_blocking(stream)?;
        let order = Order::File {
            cgroup: path_bytes(&self.files_cgroup),
            request,
        };
        let stage = Stage::start(&self.stage_program, &order, &[stream.as_fd()])?;
        self.reaper.watch();
        Ok(stage.pid)
    }

    fn keep_file_stage(&mut self, pid: Pid, stream: OwnedFd) {
        let id = self.next_file_stage;
        self.next_file_stage = id.wrapping_add(1);
        // Without an event it ends by itself, as nearly all do.
        let _ = self.poll.add(&stream, Token::File(id), EventFlags::RDHUP);
        let stage = FileStage {
            pid,
            stream,
            deadline: None,
        };
        self.file_stages.insert(id, stage);
    }

    /// The host has closed a stream: the stage sees it too, and has a moment to end and to clear up.
    pub(super) fn file_host_gone(&mut self, id: u32) {
        if let Some(stage) = self.file_stages.get_mut(&id) {
            // It would be told again and again.
            let _ = self.poll.remove(&stage.stream);
            stage.deadline = Some(Instant::now() + FILE_END_WAIT);
        }
    }

    /// Whether this process was a file's stage, of which nothing is left then.
    pub(super) fn file_stage_ended(&mut self, pid: Pid) -> bool {
        let mut stages = self.file_stages.iter();
        let found = stages.find(|(_, stage)| stage.pid == pid);
        let Some(id) = found.map(|(id, _)| *id) else {
            return false;
        };
        self.file_stages.remove(&id);
        true
    }

    /// Ends those that do not end: something in the guest stops them. What stands still is given its time anew.
    pub(super) fn end_late_files(&mut self, now: Instant) {
        let stands_still = self.stands_still();
        for stage in self.file_stages.values_mut() {
            match &mut stage.deadline {
                Some(deadline) if stands_still => *deadline = now + FILE_END_WAIT,
                Some(deadline) if *deadline <= now => {
                    // It has not been waited for, so that the number is its own.
                    let _ = rustix::process::kill_process(stage.pid, Signal::KILL);
                    stage.deadline = None;
                }
                _ => {}
            }
        }
    }

    /// When the next one is ended.
    pub(super) fn late_file_deadline(&self) -> Option<Instant> {
        let deadlines = self.file_stages.values().filter_map(|stage| stage.deadline);
        deadlines.min().filter(|_| !self.stands_still())
    }
}
