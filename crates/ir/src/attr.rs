//! The text of an operation's attributes: every attribute prints as a word that parses back to an equal value.

use crate::types::DType;

pub trait Attr: Sized {
    fn to_text(&self) -> String;
    fn read(text: &str) -> Result<Self, String>;
    /// The default, which the text omits: most operations have it.
    fn omitted() -> Option<Self> {
        None
    }
}

pub(crate) fn is_omitted<T: Attr + PartialEq>(value: &T) -> bool {
    T::omitted().as_ref() == Some(value)
}

macro_rules! attr_by_display {
    ($($ty:ty),*) => {$(
        impl Attr for $ty {
            fn to_text(&self) -> String { format!("{self}") }
            fn read(text: &str) -> Result<Self, String> {
                text.parse().map_err(|_| format!("`{text}` is not a {}", stringify!($ty)))
            }
        }
    )*};
}
attr_by_display!(usize, u32, u8, u64, bool, f32, f64);

impl Attr for DType {
    fn to_text(&self) -> String {
        self.name().into()
    }
    fn read(text: &str) -> Result<Self, String> {
        DType::ALL
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| format!("`{text}` is not an element type"))
    }
}

impl<T: Attr> Attr for Vec<T> {
    fn to_text(&self) -> String {
        format!("[{}]", self.iter().map(Attr::to_text).collect::<Vec<_>>().join(" "))
    }
    fn read(text: &str) -> Result<Self, String> {
        let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        inner.ok_or_else(|| format!("`{text}` is not a list"))?.split_whitespace().map(T::read).collect()
    }
}

/// An enum without fields whose variants have names in the text form; one of them may be the default, which the text omits.
macro_rules! named {
    (
        $(#[$meta:meta])* $vis:vis enum $ty:ident { $($(#[$vmeta:meta])* $variant:ident = $name:literal),* $(,)? }
        $(omitted $omitted:ident)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        $vis enum $ty { $($(#[$vmeta])* $variant),* }

        impl $ty {
            pub const ALL: &[$ty] = &[$($ty::$variant),*];
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name),* }
            }
        }

        impl $crate::attr::Attr for $ty {
            fn to_text(&self) -> String { self.name().into() }
            fn read(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok($ty::$variant),)*
                    _ => Err(format!("`{text}` is not a {}", stringify!($ty))),
                }
            }
            $(fn omitted() -> Option<Self> { Some($ty::$omitted) })?
        }
    };
}
pub(crate) use named;

/// `name=value` pairs of one node, taken by name.
pub struct AttrMap<'a>(pub Vec<(&'a str, &'a str)>);

impl<'a> AttrMap<'a> {
    pub fn take<T: Attr>(&mut self, name: &str) -> Result<T, String> {
        match self.0.iter().position(|(n, _)| *n == name) {
            Some(i) => T::read(self.0.remove(i).1),
            None => T::omitted().ok_or_else(|| format!("attribute `{name}` is missing")),
        }
    }
}
