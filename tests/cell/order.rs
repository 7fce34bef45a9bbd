//! What a machine's process is to do beside serving its machine: the first message on its control socket.

use jailer::Thread;

/// An order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Nothing.
    Serve,
    /// Have the heap grow, on this thread, once it is closed in.
    Grow(Thread),
    /// Panic, on this thread, once it is closed in.
    Panic(Thread),
    /// Attack from this thread, once it is closed in: all attempts, or the one with this number.
    Attack(Thread, Option<usize>),
}

impl Order {
    pub(crate) fn to_words(self) -> String {
        let name = |thread| match thread {
            Thread::Main => "main",
            Thread::Vcpu => "vcpu",
        };
        match self {
            Self::Serve => "serve".to_owned(),
            Self::Grow(thread) => format!("grow {}", name(thread)),
            Self::Panic(thread) => format!("panic {}", name(thread)),
            Self::Attack(thread, None) => format!("attack {}", name(thread)),
            Self::Attack(thread, Some(only)) => format!("attack {} {only}", name(thread)),
        }
    }

    pub(crate) fn from_words(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        let order = words.next()?;
        let thread = match words.next() {
            None => None,
            Some("main") => Some(Thread::Main),
            Some("vcpu") => Some(Thread::Vcpu),
            Some(_) => return None,
        };
        match order {
            "serve" => Some(Self::Serve),
            "grow" => Some(Self::Grow(thread?)),
            "panic" => Some(Self::Panic(thread?)),
            "attack" => {
                let only = words.next().map(str::parse).transpose().ok()?;
                Some(Self::Attack(thread?, only))
            }
            _ => None,
        }
    }
}
