//! What the hostile guest knows of its machine before it looks.

/// Sectors of each of its disks.
pub const DISK_SECTORS: u16 = 2048;

/// What is on each of its disks at the start: a pattern in each sector.
#[must_use]
pub fn disk() -> Vec<u8> {
    (0..DISK_SECTORS)
        .flat_map(|sector| {
            let first = sector.to_le_bytes()[0].wrapping_mul(7);
            (0..512u16).map(move |index| first.wrapping_add(index.to_le_bytes()[0]))
        })
        .collect()
}
