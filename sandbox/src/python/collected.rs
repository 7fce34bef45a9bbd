//! What a run has said so far, within its bounds.

use super::frame::Frame;
use super::result::Evaluation;
use super::{MAX_DISPLAYS, MAX_EVALUATION_OUTPUT_BYTES};

/// Most bytes of all displays together.
const MAX_DISPLAY_BYTES: usize = 128 << 20;

/// What a run has said so far.
#[derive(Debug, Default)]
pub(super) struct Collected {
    pub(super) evaluation: Evaluation,
    display_bytes: usize,
}

impl Collected {
    pub(super) fn take(&mut self, frame: Frame) {
        let found = &mut self.evaluation;
        match frame {
            Frame::Output(bytes) => keep(&mut found.stdout, &bytes, &mut found.truncated),
            Frame::Error(bytes) => keep(&mut found.stderr, &bytes, &mut found.truncated),
            Frame::Display(shown) => {
                let bytes: usize = shown.iter().map(|(_, bytes)| bytes.len()).sum();
                if found.displays.len() < MAX_DISPLAYS
                    && self.display_bytes + bytes <= MAX_DISPLAY_BYTES
                {
                    self.display_bytes += bytes;
                    found.displays.push(shown);
                } else {
                    found.truncated = true;
                }
            }
            Frame::Value(value) => found.value = Some(value),
            Frame::Exception(exception) => found.exception = Some(exception),
            Frame::Over | Frame::Complete(_) => {}
        }
    }
}

fn keep(kept: &mut Vec<u8>, bytes: &[u8], truncated: &mut bool) {
    let room = MAX_EVALUATION_OUTPUT_BYTES.saturating_sub(kept.len());
    *truncated |= bytes.len() > room;
    kept.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
}
