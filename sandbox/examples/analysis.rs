//! A data analysis: a file in, questions that build on each other, a plot out.
//! `cargo run -p sandvmm --example analysis -- ROOTFS`, with a root image that has matplotlib and pandas.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use sandvmm::Sandbox;

const DATA: &str = "city,year,people\nA,2000,10\nA,2020,30\nB,2000,20\nB,2020,25\n";

/// What the analysis found.
#[derive(Debug)]
pub(crate) struct Findings {
    /// The table, as text and as HTML.
    pub(crate) table: (String, String),
    /// The plot, a PNG.
    pub(crate) plot: Vec<u8>,
    /// The result's file, from the guest.
    pub(crate) file: Vec<u8>,
}

fn main() -> Result<(), Box<dyn Error>> {
    sandvmm::init();
    let rootfs = std::env::args_os().nth(1).ok_or("Name a root image")?;
    let found = run(Path::new(&rootfs))?;
    println!("{}", found.table.0);
    std::fs::write("plot.png", found.plot)?;
    std::fs::write("total.csv", found.file)?;
    Ok(())
}

/// The whole session.
pub(crate) fn run(rootfs: &Path) -> Result<Findings, Box<dyn Error>> {
    let sandbox = Sandbox::builder()
        .rootfs(rootfs)
        .memory_mib(512)
        .timeout(Some(Duration::from_secs(600)))
        .start()?;
    sandbox.write("data.csv", DATA.as_bytes())?;
    let python = sandbox.python()?;
    python.run("import pandas as pd\nframe = pd.read_csv('data.csv')")?;
    // Each step finds what the one before has left.
    let summed = python
        .call("total = frame.groupby('year').people.sum().to_frame(); total")
        .deadline(Duration::from_secs(60))
        .run()?;
    let drawn = python.run("total.plot.bar(); total.to_csv('total.csv')")?;
    if let Some(exception) = drawn.exception.or(summed.exception) {
        return Err(exception.traceback.into());
    }
    let table = summed.value.ok_or("There is no table")?;
    let plot = drawn.displays.first().and_then(|shown| shown.png());
    Ok(Findings {
        table: (
            table.text().unwrap_or_default().to_owned(),
            table.html().unwrap_or_default().to_owned(),
        ),
        plot: plot.ok_or("There is no plot")?.to_vec(),
        file: sandbox.read("total.csv")?,
    })
}
