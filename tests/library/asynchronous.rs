//! The asynchronous face with real machines.

use std::sync::Arc;

use sandvmm::{Outcome, Sandbox};

use crate::{HUNG_AFTER, Test, text};

pub(crate) const TESTS: &[Test] = &[(
    "machines_start_and_commands_run_as_tasks_of_one_thread",
    tasks,
)];

fn tasks() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let run = |number: u32| async move {
        let builder = Sandbox::builder().memory_mib(128);
        let sandbox = builder
            .timeout(Some(HUNG_AFTER))
            .start_async()
            .await
            .unwrap();
        let sandbox = Arc::new(sandbox);
        sandbox
            .blocking(move |sandbox| sandbox.write("number", number.to_string().as_bytes()))
            .await
            .unwrap();
        let mut command = sandbox.command("sh");
        command.arg("-c").arg("cat number; exit 3");
        let output = command.output_async().await.unwrap();
        assert_eq!(output.completion.outcome, Outcome::Exited(3));
        drop(command);
        let ended = Arc::into_inner(sandbox).unwrap().end_async().await;
        assert_eq!(ended.crash, None);
        text(&output)
    };

    let outputs = runtime.block_on(async { tokio::join!(run(1), run(2), run(3)) });

    assert_eq!(outputs, ("1".to_owned(), "2".to_owned(), "3".to_owned()));
}
