//! What happens in the sandbox, as lines of a file: `--events FILE`.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use sandvmm::Event;

use crate::{notice, open};

/// Events that wait for the file to take them; further ones are counted, and told of.
const MAX_WAITING: usize = 4096;

/// The thread that writes.
#[derive(Debug)]
pub(crate) struct Writer(JoinHandle<()>);

impl Writer {
    /// Begins a new file.
    ///
    /// # Errors
    /// When it can't be written, or there is no thread.
    pub(crate) fn start(path: &Path) -> io::Result<(SyncSender<Event>, Self)> {
        let file = open::to_write(
            File::options().write(true).create(true).truncate(true),
            path,
        )?;
        let (sender, events) = sync_channel(MAX_WAITING);
        let thread = thread::Builder::new()
            .name("events".into())
            .spawn(move || {
                if let Err(error) = write(&events, file) {
                    notice::say(&format!("The events could not be written: {error}"));
                }
            })
            .map_err(sandvmm::host::name_limit)?;
        Ok((sender, Self(thread)))
    }

    /// Waits until all are written: the sandbox is gone, or was never there.
    pub(crate) fn finish(self) {
        // Its panic would have been shown.
        let _ = self.0.join();
    }
}

fn write(events: &Receiver<Event>, mut file: impl Write) -> io::Result<()> {
    for event in events {
        let mut line = event.to_json().to_string();
        line.push('\n');
        file.write_all(line.as_bytes())?;
    }
    Ok(())
}
