//! The emulated host's kernel and initramfs: Debian's kernel, the drivers that it has as modules, a shell to load them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, CacheError, Key};
use crate::cpio::{Archive, TooLong};
use crate::packages::{self, PackageError};
use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// Drivers of the emulated host; what they need in turn is found out. Those that a kernel has built in are left out.
const MODULES: [&str; 8] = [
    "kvm_amd",
    "virtio_pci",
    "virtio_console",
    "9p",
    "9pnet_virtio",
    "overlay",
    // What a KVM host may be asked for by sandvmm: guest streams and loop devices for its images.
    "vhost_vsock",
    "loop",
];
/// Packages with a kernel that has all of [`MODULES`]: Debian's, Ubuntu's. (Debian's linux-image-cloud-amd64 has no 9p.)
const KERNEL_PACKAGES: [&str; 2] = ["linux-image-amd64", "linux-image-generic"];
/// Brings a static shell with mount, insmod and switch_root.
const SHELL_PACKAGE: &str = "busybox-static";
const INIT: &str = include_str!("init.sh");
/// Folders in which packages keep kernels, modules and the shell, with and without a merged /usr.
const PREFIXES: [&str; 2] = ["", "usr"];

/// Why there is no kernel or initramfs for the emulated host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestError {
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The packages could not be had.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A program for unpacking failed.
    #[error("Could not unpack the emulated host's kernel")]
    Tool(#[from] ToolError),
    /// The packages did not hold what they were expected to.
    #[error("The packages {packages} hold no {what}")]
    Incomplete {
        /// The packages.
        packages: String,
        /// What is missing.
        what: String,
    },
    /// A driver is too large.
    #[error("Could not pack the emulated host's initramfs")]
    Archive(#[from] TooLong),
}

/// Files to boot the emulated host from.
#[derive(Debug)]
pub(crate) struct Guest {
    /// Kernel, bzImage.
    pub(crate) kernel: PathBuf,
    /// Initramfs, uncompressed cpio.
    pub(crate) initramfs: PathBuf,
}

/// Returns the emulated host's kernel and initramfs, made from Debian's packages the first time.
pub(crate) fn prepare(cache: &Cache, progress: &Progress) -> Result<Guest, GuestError> {
    let inputs = MODULES
        .iter()
        .chain(&KERNEL_PACKAGES)
        .chain([&SHELL_PACKAGE]);
    let parts = cache.entry("host-kernel", &Key::of(inputs.clone()), |staging| {
        let _step = progress.begin("Getting a kernel for the emulated host");
        collect(staging)
    })?;
    let key = Key::of(inputs.chain([&INIT]));
    let packed = cache.entry("host-initramfs", &key, |staging| {
        let bytes = pack(&parts)?;
        write(&staging.join("initramfs.cpio"), &bytes)
    })?;
    Ok(Guest {
        kernel: parts.join("vmlinuz"),
        initramfs: packed.join("initramfs.cpio"),
    })
}

/// Fills `folder` with `vmlinuz`, `busybox`, `modules/*.ko` (decompressed) and `modules/order`.
fn collect(folder: &Path) -> Result<(), GuestError> {
    let packages = kernel_packages()?;
    let listed = packages.join(" ");
    let incomplete = |what: &str| GuestError::Incomplete {
        packages: listed.clone(),
        what: what.to_owned(),
    };
    let unpacked = folder.join("unpacked");
    packages::unpack(&packages, &unpacked)?;

    let find = |place: &str, accept: &dyn Fn(&str) -> bool| -> Option<PathBuf> {
        let mut found: Vec<PathBuf> = PREFIXES
            .iter()
            .filter_map(|prefix| std::fs::read_dir(unpacked.join(prefix).join(place)).ok())
            .flat_map(|listing| listing.flatten())
            .map(|entry| entry.path())
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| accept(&name.to_string_lossy()))
            })
            .collect();
        found.sort();
        found.pop()
    };
    let kernel =
        find("boot", &|name| name.starts_with("vmlinuz")).ok_or_else(|| incomplete("kernel"))?;
    copy(&kernel, &folder.join("vmlinuz"))?;
    let shell = find("bin", &|name| name == "busybox").ok_or_else(|| incomplete("busybox"))?;
    copy(&shell, &folder.join("busybox"))?;
    let modules = find("lib/modules", &|_| true).ok_or_else(|| incomplete("modules"))?;
    collect_modules(&modules, &folder.join("modules")).map_err(|error| match error {
        ModulesError::Missing(name) => incomplete(&format!("module {name}")),
        ModulesError::Other(error) => error,
    })?;
    std::fs::remove_dir_all(&unpacked).map_err(CacheError::io("remove", &unpacked))?;
    Ok(())
}

/// The packages to download: a kernel by its versioned name, packages of modules on which it depends, and the shell.
fn kernel_packages() -> Result<Vec<String>, GuestError> {
    let mut failure = None;
    for name in KERNEL_PACKAGES {
        let mut found = BTreeSet::new();
        let mut open = vec![name.to_owned()];
        while let Some(next) = open.pop() {
            match packages::dependencies(&next) {
                Ok(names) => open.extend(
                    names
                        .into_iter()
                        .filter(|name| {
                            name.starts_with("linux-image-") || name.starts_with("linux-modules-")
                        })
                        .filter(|name| found.insert(name.clone())),
                ),
                Err(error) => failure = Some(error),
            }
        }
        if !found.is_empty() {
            found.insert(SHELL_PACKAGE.to_owned());
            return Ok(found.into_iter().collect());
        }
    }
    match failure {
        Some(error) => Err(error.into()),
        None => Err(GuestError::Incomplete {
            packages: KERNEL_PACKAGES.join(" "),
            what: "kernel".to_owned(),
        }),
    }
}

enum ModulesError {
    Missing(String),
    Other(GuestError),
}

impl<E: Into<GuestError>> From<E> for ModulesError {
    fn from(error: E) -> Self {
        Self::Other(error.into())
    }
}

/// Copies [`MODULES`] and what they need from `tree` (lib/modules/VERSION) to `target`, and writes the order of loading.
fn collect_modules(tree: &Path, target: &Path) -> Result<(), ModulesError> {
    std::fs::create_dir_all(target).map_err(CacheError::io("create the folder", target))?;
    let mut files = BTreeMap::new();
    list_modules(&tree.join("kernel"), &mut files)?;
    let built_in_list = tree.join("modules.builtin");
    let built_in: BTreeSet<String> = std::fs::read_to_string(&built_in_list)
        .map_err(CacheError::io("read", &built_in_list))?
        .lines()
        .filter_map(|line| module_name(Path::new(line)))
        .collect();

    let mut order = Vec::new();
    for name in MODULES {
        take_module(name, &files, &built_in, target, &mut order)?;
    }
    let list: String = order.iter().map(|name| format!("{name}.ko\n")).collect();
    Ok(write(&target.join("order"), list.as_bytes())?)
}

/// Copies the module `name` after those that it depends on; `order` holds what has been copied.
fn take_module(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    built_in: &BTreeSet<String>,
    target: &Path,
    order: &mut Vec<String>,
) -> Result<(), ModulesError> {
    if built_in.contains(name) || order.iter().any(|taken| taken == name) {
        return Ok(());
    }
    let file = files
        .get(name)
        .ok_or_else(|| ModulesError::Missing(name.to_owned()))?;
    let content = decompressed(file)?;
    for needed in dependencies_of(&content) {
        take_module(&needed, files, built_in, target, order)?;
    }
    write(&target.join(format!("{name}.ko")), &content)?;
    order.push(name.to_owned());
    Ok(())
}

/// The names after `depends=` in a module's `.modinfo` section, which holds NUL-terminated `key=value` strings.
fn dependencies_of(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = module.get(start + KEY.len()..).unwrap_or_default();
    let value = value.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn list_modules(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), CacheError> {
    let listing = std::fs::read_dir(folder).map_err(CacheError::io("list", folder))?;
    for entry in listing.flatten() {
        let path = entry.path();
        if path.is_dir() {
            list_modules(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// `kvm_amd` of `…/kvm-amd.ko.xz`.
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let (name, _) = name.split_once(".ko")?;
    Some(name.replace('-', "_"))
}

/// A module's content, decompressed where the distribution compresses them.
fn decompressed(file: &Path) -> Result<Vec<u8>, GuestError> {
    let program = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return Ok(std::fs::read(file).map_err(CacheError::io("read", file))?),
    };
    Ok(tool::run(Command::new(program).arg("-dc").arg(file))?)
}

/// The initramfs: the shell, its script, the modules, empty folders to mount on.
fn pack(parts: &Path) -> Result<Vec<u8>, GuestError> {
    let read = |name: &Path| {
        let path = parts.join(name);
        std::fs::read(&path).map_err(CacheError::io("read", &path))
    };
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lower", "modules", "proc", "root", "upper"] {
        archive.folder(folder, 0o755)?;
    }
    // The kernel opens it for the first program before anything is mounted.
    archive.device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("bin/busybox", 0o755, &read(Path::new("busybox"))?)?;
    let order = read(Path::new("modules/order"))?;
    for name in String::from_utf8_lossy(&order).lines() {
        let module = Path::new("modules").join(name);
        archive.file(&module.to_string_lossy(), 0o644, &read(&module)?)?;
    }
    archive.file("modules/order", 0o644, &order)?;
    Ok(archive.finish()?)
}

fn copy(from: &Path, to: &Path) -> Result<(), GuestError> {
    let content = std::fs::read(from).map_err(CacheError::io("read", from))?;
    write(to, &content)
}

fn write(path: &Path, content: &[u8]) -> Result<(), GuestError> {
    Ok(std::fs::write(path, content).map_err(CacheError::io("write", path))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_module_information() {
        let module = b"ELF...\0license=GPL\0depends=kvm,ccp,irq-bypass\0name=x\0";

        assert_eq!(dependencies_of(module), ["kvm", "ccp", "irq_bypass"]);
        assert!(dependencies_of(b"\0depends=\0").is_empty());
        assert!(dependencies_of(b"nothing").is_empty());
    }

    #[test]
    fn a_modules_name_has_no_dash_and_no_ending() {
        assert_eq!(
            module_name(Path::new("a/kvm-amd.ko.xz")).as_deref(),
            Some("kvm_amd")
        );
        assert_eq!(module_name(Path::new("a/modules.dep")), None);
    }
}
