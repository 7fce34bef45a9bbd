//! Virtio-block (virtio 1.2 §5.2).

pub mod disk;

pub use disk::{Disk, SECTOR_SIZE};
