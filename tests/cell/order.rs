//! What a machine's process is to do beside serving its machine: the first message on its control socket.

use jailer::Thread;

use crate::attack::Target;

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
    Attack(Thread, Option<usize>, Target),
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
            Self::Attack(thread, only, target) => {
                let Target {
                    pid,
                    tcp_port,
                    udp_port,
                    key,
                    segment,
                    is_direct,
                } = target;
                let only = only.map_or(-1, usize::cast_signed);
                let is_direct = u8::from(is_direct);
                format!(
                    "attack {} {only} {pid} {tcp_port} {udp_port} {key} {segment} {is_direct}",
                    name(thread)
                )
            }
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
                let only = words.next()?.parse::<isize>().ok()?;
                let target = Target {
                    pid: words.next()?.parse().ok()?,
                    tcp_port: words.next()?.parse().ok()?,
                    udp_port: words.next()?.parse().ok()?,
                    key: words.next()?.parse().ok()?,
                    segment: words.next()?.parse().ok()?,
                    is_direct: words.next()? == "1",
                };
                Some(Self::Attack(thread?, usize::try_from(only).ok(), target))
            }
            _ => None,
        }
    }
}
