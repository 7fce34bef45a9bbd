//! A writer for the kernel's initramfs format: the "newc" cpio archive (kernel: `Documentation/driver-api/early-userspace/buffer-format.rst`).
//!
//! The same calls give the same bytes: times are zero, owners are root, inode numbers count from one.

/// Magic number of the format without checksums.
const MAGIC: &str = "070701";
/// Name of the record that ends an archive.
const TRAILER: &str = "TRAILER!!!";
/// Every header with its name, and every file's content, is padded to a multiple of this many bytes.
const ALIGNMENT: usize = 4;
/// The archive as a whole is padded to a multiple of this many bytes, as cpio(1) does.
const BLOCK_BYTES: usize = 512;
const TYPE_FOLDER: u32 = 0o040_000;
const TYPE_FILE: u32 = 0o100_000;
const TYPE_CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive under construction. Paths are relative to the root, without a leading `/`; a folder comes before what is in it.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    records: u32,
}

/// A file longer than the format's 32-bit length field can say.
#[derive(Debug, thiserror::Error)]
#[error("{name} is too long for an initramfs: {len} bytes")]
pub(crate) struct TooLong {
    name: String,
    len: usize,
}

impl Archive {
    /// Adds a folder with the permission bits `mode`.
    pub(crate) fn folder(&mut self, name: &str, mode: u32) -> Result<(), TooLong> {
        self.record(name, TYPE_FOLDER | mode, &[], (0, 0))
    }

    /// Adds a file with the permission bits `mode`.
    pub(crate) fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<(), TooLong> {
        self.record(name, TYPE_FILE | mode, content, (0, 0))
    }

    /// Adds a character device with the permission bits `mode` and the numbers `(major, minor)`.
    pub(crate) fn device(
        &mut self,
        name: &str,
        mode: u32,
        numbers: (u32, u32),
    ) -> Result<(), TooLong> {
        self.record(name, TYPE_CHARACTER_DEVICE | mode, &[], numbers)
    }

    /// Ends the archive and returns its bytes.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, TooLong> {
        self.record(TRAILER, 0, &[], (0, 0))?;
        self.pad(BLOCK_BYTES);
        Ok(self.bytes)
    }

    fn record(
        &mut self,
        name: &str,
        mode: u32,
        content: &[u8],
        device: (u32, u32),
    ) -> Result<(), TooLong> {
        let len = u32::try_from(content.len()).map_err(|_| TooLong {
            name: name.to_owned(),
            len: content.len(),
        })?;
        let name_len = u32::try_from(name.len() + 1).map_err(|_| TooLong {
            name: name.to_owned(),
            len: name.len(),
        })?;
        let is_trailer = name == TRAILER;
        if !is_trailer {
            self.records += 1;
        }
        let inode = if is_trailer { 0 } else { self.records };
        let links = if mode & TYPE_FOLDER != 0 && mode & TYPE_FILE == 0 {
            2
        } else {
            1
        };
        // inode, mode, uid, gid, links, time, length, device of the file (major, minor), device numbers of a node
        // (major, minor), length of the name with its NUL, checksum: eight hexadecimal digits each.
        let fields = [
            inode, mode, 0, 0, links, 0, len, 0, 0, device.0, device.1, name_len, 0,
        ];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(ALIGNMENT);
        self.bytes.extend_from_slice(content);
        self.pad(ALIGNMENT);
        Ok(())
    }

    fn pad(&mut self, alignment: usize) {
        let padded = self.bytes.len().next_multiple_of(alignment);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn sample() -> Vec<u8> {
        let mut archive = Archive::default();
        archive.folder("dev", 0o755).unwrap();
        archive.device("dev/console", 0o600, (5, 1)).unwrap();
        archive.file("init", 0o755, b"#!/bin/sh\n").unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn the_same_calls_give_the_same_bytes() {
        assert_eq!(sample(), sample());
    }

    #[test]
    fn a_header_has_the_documented_layout() {
        let bytes = sample();

        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000041ED", "mode of a folder 0755");
        assert_eq!(
            &bytes[94..102],
            b"00000004",
            "length of \"dev\" and its NUL"
        );
        assert_eq!(&bytes[110..114], b"dev\0");
        assert_eq!(bytes.len() % BLOCK_BYTES, 0);
    }

    #[test]
    fn cpio_lists_what_was_written() {
        let Ok(mut cpio) = Command::new("cpio")
            .args(["-tv", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        else {
            eprintln!("skipped: cpio is not installed");
            return;
        };
        cpio.stdin.take().unwrap().write_all(&sample()).unwrap();

        let output = cpio.wait_with_output().unwrap();

        let listing = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<_> = listing.lines().collect();
        assert_eq!(lines.len(), 3, "{listing}");
        assert!(lines[0].starts_with("drwxr-xr-x"), "{listing}");
        assert!(
            lines[1].starts_with("crw-------") && lines[1].contains("5,   1"),
            "{listing}"
        );
        assert!(lines[2].starts_with("-rwxr-xr-x"), "{listing}");
    }
}
