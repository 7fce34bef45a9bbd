//! What may go to other threads, and be used by several: this file compiles, or it may not any more.

use crate::egress::{EgressHandle, Secret};
use crate::script::Script;
use crate::session::{
    LogFollower, Session, SessionChild, SessionClaim, SessionCommand, SessionKeep, SessionServer,
};
use crate::template::StillPaused;
use crate::{
    Child, ChildStderr, ChildStdin, ChildStdout, ChildTerminal, Command, Completion, Evaluation,
    Event, FileReader, FileWatch, Files, Output, Pool, PoolBuilder, Pooled, Python, Sandbox,
    SandboxBuilder, Template, TemplateBuilder, Workspace,
};

/// Everything that is held.
macro_rules! for_each_handle {
    ($does:ident) => {
        const _: () = {
            $does::<Sandbox>();
            $does::<Command>();
            $does::<Child>();
            $does::<ChildStdin>();
            $does::<ChildStdout>();
            $does::<ChildStderr>();
            $does::<ChildTerminal>();
            $does::<Output>();
            $does::<Completion>();
            $does::<Event>();
            $does::<Files<'_>>();
            $does::<FileReader>();
            $does::<FileWatch<'_>>();
            $does::<Python>();
            $does::<Evaluation>();
            $does::<Pool>();
            $does::<PoolBuilder>();
            $does::<Pooled>();
            $does::<Template>();
            $does::<Workspace>();
            $does::<StillPaused>();
            $does::<Script>();
            $does::<EgressHandle>();
            $does::<Secret>();
            $does::<Session>();
            $does::<SessionCommand<'_>>();
            $does::<SessionChild>();
            $does::<SessionClaim>();
            $does::<SessionKeep>();
            $does::<SessionServer>();
            $does::<LogFollower>();
            $does::<SandboxBuilder>();
            $does::<TemplateBuilder>();
        };
    };
}

const fn goes_to_another_thread<T: Send>() {}
const fn is_used_by_several_threads<T: Sync>() {}

for_each_handle!(goes_to_another_thread);
for_each_handle!(is_used_by_several_threads);

/// Errors go through `?` into any boxed one, and through threads.
const fn is_an_error<T: std::error::Error + Send + Sync + 'static>() {}

const _: () = {
    is_an_error::<crate::StartError>();
    is_an_error::<crate::SpawnError>();
    is_an_error::<crate::SignalError>();
    is_an_error::<crate::FileError>();
    is_an_error::<crate::FreezeError>();
    is_an_error::<crate::SaveError>();
    is_an_error::<crate::ImagesError>();
    is_an_error::<crate::HostFunctionError>();
    is_an_error::<crate::PythonError>();
    is_an_error::<crate::PoolError>();
    is_an_error::<crate::PauseError>();
    is_an_error::<crate::TemplateError>();
    is_an_error::<crate::WorkspaceError>();
    is_an_error::<crate::script::ScriptError>();
    is_an_error::<crate::session::SessionError>();
    is_an_error::<crate::egress::RuleError>();
    is_an_error::<crate::egress::SecretError>();
};

/// A runtime of several threads may take a task from one to another between two polls.
#[cfg(feature = "tokio")]
const _: () = {
    fn goes<T: Send>(_: T) {}

    fn of_commands(command: &mut Command, child: &mut Child, owned: Child) {
        goes(command.spawn_async());
        goes(command.output_async());
        goes(command.status_async());
        goes(child.wait_async());
        goes(owned.wait_with_output_async());
    }

    fn of_sandboxes(sandbox: Sandbox, builder: SandboxBuilder) {
        goes(sandbox.end_async());
        goes(builder.start_async());
    }

    let _: fn(&mut Command, &mut Child, Child) = of_commands;
    let _: fn(Sandbox, SandboxBuilder) = of_sandboxes;
    goes_to_another_thread::<crate::AsyncEnd>();
    is_used_by_several_threads::<crate::AsyncEnd>();
};
