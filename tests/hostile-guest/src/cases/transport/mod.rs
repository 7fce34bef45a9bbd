//! Registers and states of the virtio-mmio transport.

mod floods;
mod queues;
mod registers;
mod resets;
mod states;

use crate::virtio::status;

pub(crate) use floods::*;
pub(crate) use queues::*;
pub(crate) use registers::*;
pub(crate) use resets::*;
pub(crate) use states::*;

/// Status once the features are agreed on (virtio 1.2 §2.1).
const AGREED: u32 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
