//! Writes the inputs that are made by hand (each target's `seeds`) to `corpus/`. Those that a fuzzer found begin with `found-` and stay.

use std::error::Error;
use std::fs;
use std::path::Path;

use sandvmm_fuzz::TARGETS;

fn main() -> Result<(), Box<dyn Error>> {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("corpus")
            .join(target.name);
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().starts_with("found-") {
                fs::remove_file(entry.path())?;
            }
        }
        for (name, bytes) in (target.seeds)() {
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
