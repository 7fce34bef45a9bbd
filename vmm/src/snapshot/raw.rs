//! KVM's structures as the bytes that the kernel gives and takes, for serde: of exactly their length, or refused.

/// One structure.
pub(super) mod one {
    use std::fmt;
    use std::marker::PhantomData;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};
    use zerocopy::{FromBytes, Immutable, IntoBytes};

    pub(in crate::snapshot) fn serialize<T, S>(value: &T, to: S) -> Result<S::Ok, S::Error>
    where
        T: IntoBytes + Immutable,
        S: Serializer,
    {
        to.serialize_bytes(value.as_bytes())
    }

    pub(in crate::snapshot) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromBytes,
        D: Deserializer<'de>,
    {
        struct Exactly<T>(PhantomData<T>);

        impl<T: FromBytes> Visitor<'_> for Exactly<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} bytes", size_of::<T>())
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<T, E> {
                T::read_from_bytes(bytes).map_err(|_| E::invalid_length(bytes.len(), &self))
            }
        }

        from.deserialize_bytes(Exactly(PhantomData))
    }
}

/// A list of structures, one after the other; at most [`many::MAX_ENTRIES`].
pub(super) mod many {
    use std::fmt;
    use std::marker::PhantomData;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};
    use zerocopy::{FromBytes, Immutable, IntoBytes};

    /// The longest list that KVM takes is that of CPUID and of model-specific registers: 256 entries
    /// (`KVM_MAX_CPUID_ENTRIES`, `MAX_IO_MSRS` of arch/x86/kvm).
    pub(in crate::snapshot) const MAX_ENTRIES: usize = 256;

    pub(in crate::snapshot) fn serialize<T, S>(list: &[T], to: S) -> Result<S::Ok, S::Error>
    where
        T: IntoBytes + Immutable,
        S: Serializer,
    {
        to.serialize_bytes(list.as_bytes())
    }

    pub(in crate::snapshot) fn deserialize<'de, T, D>(from: D) -> Result<Vec<T>, D::Error>
    where
        T: FromBytes,
        D: Deserializer<'de>,
    {
        struct List<T>(PhantomData<T>);

        impl<T: FromBytes> Visitor<'_> for List<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_ENTRIES} times {} bytes", size_of::<T>())
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<T>, E> {
                let wrong = || E::invalid_length(bytes.len(), &self);
                let entries = bytes.chunks_exact(size_of::<T>());
                if entries.len() > MAX_ENTRIES || !entries.remainder().is_empty() {
                    return Err(wrong());
                }
                entries
                    .map(|entry| T::read_from_bytes(entry).map_err(|_| wrong()))
                    .collect()
            }
        }

        from.deserialize_bytes(List(PhantomData))
    }
}
