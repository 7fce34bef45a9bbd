//! `cargo xtask setup`: everything that a microVM is started from, in the data folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{self, Cache, CacheError, Lock};
use crate::host;
use crate::image::{self, ImageError, Variant};
use crate::initramfs::{self, InitramfsError};
use crate::kernel::{self, KernelError};
use crate::progress::Progress;
use crate::tool::{self, ToolError};
use crate::workspace::Workspace;

/// The template that runs fork which name none.
const TEMPLATE: &str = "default";
/// What its interpreter has imported: what scripts import most, of the standard library.
const TEMPLATE_CODE: &str = "import argparse, base64, collections, contextlib, csv, dataclasses, datetime, decimal, enum, functools, \
     hashlib, heapq, io, itertools, json, logging, math, operator, os, pathlib, pickle, random, re, shutil, statistics, string, struct, \
     subprocess, sys, tempfile, textwrap, threading, time, traceback, typing, urllib.parse, uuid, zlib";

/// Why the set-up is not complete.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    /// A folder or file is not usable.
    #[error(transparent)]
    File(#[from] CacheError),
    /// No guest kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No root image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// No initramfs.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// The command was not built.
    #[error("Could not build the command sandvmm")]
    Command(#[source] ToolError),
    /// No default template.
    #[error("Could not build the default template")]
    Template(#[source] ToolError),
}

/// The folder of what microVMs are started from: `$SANDVMM_HOME`, else the XDG data folder's `sandvmm`.
#[derive(Debug)]
pub(crate) struct DataFolder(PathBuf);

impl DataFolder {
    /// Finds it, as the command `sandvmm` does.
    pub(crate) fn find() -> Result<Self, CacheError> {
        match std::env::var_os("SANDVMM_HOME").filter(|set| !set.is_empty()) {
            Some(set) => Ok(Self(set.into())),
            None => Ok(Self(cache::xdg_folder("XDG_DATA_HOME", ".local/share")?)),
        }
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

/// Builds kernel, root image and initramfs where they are missing or old, and installs them.
pub(crate) fn setup(
    workspace: &Workspace,
    cache: &Cache,
    progress: &Progress,
) -> Result<DataFolder, SetupError> {
    let data = DataFolder::find()?;
    let folder = data.path();
    std::fs::create_dir_all(folder).map_err(CacheError::io("create the folder", folder))?;
    let kernel = kernel::build(cache, progress)?;
    let image = image::build(Variant::Standard, cache, progress)?;
    let _lock = Lock::take(&folder.join(".lock"))?;
    cache::install(&kernel, &folder.join("vmlinux"))?;
    cache::install(&image, &folder.join("rootfs.erofs"))?;
    initramfs::install(workspace, &folder.join("initramfs.cpio"), progress)?;
    Ok(data)
}

/// Builds the template that plain runs fork, unless there is one that is whole. It is bound to the processor that it was built on,
/// so only a machine that is a KVM host by itself gets one: an emulated host is another one each time.
pub(crate) fn default_template(
    workspace: &Workspace,
    data: &DataFolder,
    progress: &Progress,
) -> Result<(), SetupError> {
    if !host::is_here() {
        progress.say("No default template: this machine has no hardware virtualization. Runs boot");
        return Ok(());
    }
    build_command(workspace, progress)?;
    let sandvmm = |arguments: &[&str]| {
        let mut command = Command::new(workspace.release_folder().join("sandvmm"));
        command
            .arg("template")
            .args(arguments)
            .env("SANDVMM_HOME", data.path());
        command
    };
    if tool::run(&mut sandvmm(&["verify", TEMPLATE])).is_ok() {
        return Ok(());
    }
    let _step = progress.begin("Building the default template");
    let build = ["build", TEMPLATE, "--force", "--warm", TEMPLATE_CODE];
    tool::run(&mut sandvmm(&build))
        .map(drop)
        .map_err(SetupError::Template)
}

/// Builds the command `sandvmm`, as it is released.
pub(crate) fn build_command(workspace: &Workspace, progress: &Progress) -> Result<(), SetupError> {
    let built = workspace.release_folder().join("sandvmm");
    let _step = (!built.exists()).then(|| progress.begin("Building sandvmm"));
    let mut build = workspace.build_static("sandvmm-cli", "");
    tool::run(&mut build).map(drop).map_err(SetupError::Command)
}
