//! `cargo xtask image`: the guest's root image, Debian 12 with Python, as an erofs file.
//!
//! The same package versions give the same bytes: what names the machine or the moment is removed, times, owners and the file
//! system's identity are fixed, and mkfs.erofs sorts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, CacheError, Key};
use crate::packages::{self, Need, PackageError};
use crate::progress::Progress;
use crate::reproducible::{self, Differs};
use crate::tool::{self, ToolError};

/// Debian 12's name. Its Python is 3.11, as `customize.sh` says too.
const SUITE: &str = "bookworm";
/// What the image has beside Debian's essential packages: Python with its standard library whole, the names of protocols and
/// ports that programs look up, and the word for dpkg that /bin is /usr/bin already, without which perl comes along for it.
const PACKAGES: &str = "python3,netbase,usr-is-merged";
/// The standard library's own tests, and what a data analysis imports.
const TESTS_PACKAGES: &str = "libpython3.11-testsuite,python3-matplotlib,python3-pandas";
/// Programs that talk to servers.
const CLIENTS_PACKAGES: &str = "apt,ca-certificates,curl,git,nodejs,postgresql-client,python3-h2,python3-httpx,python3-pip,python3-requests,redis-tools";
/// No documentation, no translations.
const EXCLUDED: [&str; 5] = [
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
];
const CUSTOMIZE: &str = include_str!("image/customize.sh");
/// 2025-01-01, the time of every file: any fixed time will do.
const TIME_S: &str = "1735689600";
/// Identity of the file system: any fixed one will do.
const UUID: &str = "73616e64-766d-6d00-8000-000000000001";
/// How the file system is made, beside its time and identity: without extended attributes, of which the files have none, and
/// uncompressed. Compressed with lz4hc it is 56 MB instead of 96 MB, takes 17 s instead of 1 s to make, and a first
/// `import asyncio, sqlite3` costs the guest's kernel 140 million instructions instead of 70 million.
const FORMAT: [&str; 2] = ["-x-1", "--quiet"];
/// Counts changes of the recipe that the constants above do not show.
const RECIPE: &str = "1";
/// The image's name in its cache entry.
const FILE: &str = "rootfs.erofs";

const NEEDS: [Need; 3] = [
    Need::new("mmdebstrap", "mmdebstrap"),
    Need::new("mkfs.erofs", "erofs-utils"),
    Need::new(
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A package is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A program failed.
    #[error("Could not build the root image")]
    Tool(#[from] ToolError),
    /// Two builds gave different bytes.
    #[error("The root image is not reproducible")]
    Differs(#[from] Differs),
}

/// Which image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// The one that users get.
    Standard,
    /// The same with the standard library's own tests and libraries for data.
    WithTests,
    /// The same as the standard one with programs that talk to servers, for tests too.
    WithClients,
}

impl Variant {
    fn packages(self) -> String {
        match self {
            Self::Standard => PACKAGES.to_owned(),
            Self::WithTests => format!("{PACKAGES},{TESTS_PACKAGES}"),
            Self::WithClients => format!("{PACKAGES},{CLIENTS_PACKAGES}"),
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Standard => "Building the root image",
            Self::WithTests => "Building the root image with what the tests import",
            Self::WithClients => "Building the root image with programs that talk to servers",
        }
    }
}

/// Returns the image, building it where the cache has none for these inputs.
pub(crate) fn build(
    variant: Variant,
    cache: &Cache,
    progress: &Progress,
) -> Result<PathBuf, ImageError> {
    let packages = variant.packages();
    let inputs = [SUITE, &packages, CUSTOMIZE, TIME_S, UUID, RECIPE];
    let key = Key::of(inputs.iter().chain(&EXCLUDED).chain(&FORMAT));
    let entry = cache.entry("image", &key, |staging| make(variant, staging, progress))?;
    Ok(entry.join(FILE))
}

/// Builds the image once more and compares: the same package versions must give the same bytes.
pub(crate) fn verify(image: &Path, cache: &Cache, progress: &Progress) -> Result<(), ImageError> {
    reproducible::verify(&image.with_file_name(""), &[FILE], cache, |again| {
        make(Variant::Standard, again, progress)
    })
}

/// Fills `staging` with the image and the list of its packages' versions.
fn make(variant: Variant, staging: &Path, progress: &Progress) -> Result<(), ImageError> {
    packages::ensure(&NEEDS, progress)?;
    let step = progress.begin(variant.title());
    let root = staging.join("root");
    step.detail("Debian's packages");
    let made = install_packages(variant, &root).and_then(|()| {
        step.detail("the file system");
        pack(&root, &staging.join(FILE))?;
        let versions = tool::run(
            Command::new("dpkg-query")
                .arg("--admindir")
                .arg(root.join("var/lib/dpkg"))
                .args(["--show", "--showformat", "${Package} ${Version}\n"]),
        )?;
        let list = staging.join("packages.txt");
        Ok(fs::write(&list, versions).map_err(CacheError::io("write", &list))?)
    });
    // They are root's, and as they can be made only by root, so are they removed.
    let removed = tool::run(packages::privileged("rm").arg("-rf").arg(&root));
    made?;
    removed?;
    Ok(())
}

/// Unpacks and configures the packages into the folder `root`, and removes what is of no use in an image.
fn install_packages(variant: Variant, root: &Path) -> Result<(), ImageError> {
    let mut command = packages::privileged("env");
    command.args([
        &format!("SOURCE_DATE_EPOCH={TIME_S}"),
        "LC_ALL=C.UTF-8",
        "mmdebstrap",
    ]);
    // As root (packages::privileged): owners are real. "essential" is Debian without apt.
    command.args([
        "--mode=root",
        "--variant=essential",
        "--format=directory",
        "--quiet",
    ]);
    command.arg(format!("--include={}", variant.packages()));
    command.arg("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr");
    command.args(EXCLUDED.map(|option| format!("--dpkgopt={option}")));
    command.arg(SUITE).arg(root);
    // This machine's own mirror where it is a Debian of the same release; mmdebstrap's default elsewhere.
    command.args(mirrors()?);
    tool::run(&mut command)?;
    tool::run(
        packages::privileged("sh")
            .args(["-c", CUSTOMIZE, "sh"])
            .arg(root),
    )?;
    Ok(())
}

/// The lines of this machine's apt sources that are for [`SUITE`], its updates and its security fixes.
fn mirrors() -> Result<Vec<String>, ImageError> {
    if !packages::has_apt() {
        return Ok(Vec::new());
    }
    let listing = tool::run(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN)|$(CODENAME)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]))?;
    Ok(matching_sources(&String::from_utf8_lossy(&listing)))
}

fn matching_sources(listing: &str) -> Vec<String> {
    let mut sources: Vec<String> = listing
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, '|');
            let (origin, codename, source) = (parts.next()?, parts.next()?, parts.next()?);
            let suite = codename.split('-').next()?;
            (origin == "Debian" && suite == SUITE && source.ends_with(" main"))
                .then(|| source.to_owned())
        })
        .collect();
    sources.sort();
    sources.dedup();
    sources
}

/// Makes the file system `image` of the folder `root`.
fn pack(root: &Path, image: &Path) -> Result<(), ImageError> {
    let mut format = packages::privileged("mkfs.erofs");
    format
        .args(FORMAT)
        .args(["-T", TIME_S, "-U", UUID])
        .arg(image)
        .arg(root);
    tool::run(&mut format)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debians_sources_of_the_release_are_taken() {
        let listing = "Debian|bookworm|deb http://m/debian/ bookworm main\n\
            Debian|bookworm-security|deb http://m/security/ bookworm-security main\n\
            Debian|bookworm|deb http://m/debian/ bookworm non-free\n\
            Debian|trixie|deb http://m/debian/ trixie main\n\
            Ubuntu|noble|deb http://u/ noble main\n\
            Someone|bookworm|deb http://s/ bookworm main\n\
            Debian|bookworm|deb http://m/debian/ bookworm main\n";

        let sources = matching_sources(listing);

        assert_eq!(
            sources,
            [
                "deb http://m/debian/ bookworm main",
                "deb http://m/security/ bookworm-security main"
            ]
        );
    }
}
