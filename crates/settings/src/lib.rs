//! Configuration keys: every section of a recipe is declared once, and its type, defaults, documentation and list of keys all come
//! from that declaration.
//!
//! A section knows nothing of files or command lines. Their readers look up `Key`s, check values against `ValueKind`s and report errors
//! before anything is deserialised.

/// The values that a key accepts.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueKind {
    Bool,
    /// A whole number, never negative.
    Whole,
    /// A finite number.
    Number,
    Text,
    Choice(&'static [&'static str]),
    /// `auto` or a whole number of 1 or more.
    WholeOrAuto,
    /// One of these words, or a list of numbers.
    WordOrNumbers(&'static [&'static str]),
    /// A list, of exactly this many elements where a length is given.
    List(Box<ValueKind>, Option<usize>),
    /// A list of tables, each with these keys.
    Tables(Vec<Key>),
    /// A section within the section: a table with these keys.
    Section(Vec<Key>),
}

/// One key of a section. A `required` key must be given; an `optional` one may be absent, which has a meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub name: &'static str,
    pub kind: ValueKind,
    pub required: bool,
    pub optional: bool,
    pub doc: &'static str,
}

/// A key with a value, in a section or in a section within it.
#[derive(Clone, Debug, PartialEq)]
pub struct Leaf {
    /// The tables between the section and the key.
    pub tables: Vec<&'static str>,
    /// The innermost of these tables that may be absent, by its name from the section on. A required key must be given only if that
    /// table is present.
    pub optional_table: Option<String>,
    pub key: Key,
}

impl Leaf {
    /// Its name from the section on: `width`, or `vision.width`.
    pub fn name(&self) -> String {
        below(&self.tables, self.key.name)
    }
}

fn below(tables: &[&str], name: &str) -> String {
    tables.iter().flat_map(|table| [table, "."]).chain([name]).collect()
}

/// The keys of a section that hold values, in the order of the declarations.
pub fn leaves(keys: Vec<Key>) -> Vec<Leaf> {
    keys.into_iter().flat_map(|key| leaves_of(&[], None, key)).collect()
}

fn leaves_of(tables: &[&'static str], optional_table: Option<String>, key: Key) -> Vec<Leaf> {
    let ValueKind::Section(keys) = key.kind else {
        return vec![Leaf { tables: tables.to_vec(), optional_table, key }];
    };
    let optional_table = if key.optional { Some(below(tables, key.name)) } else { optional_table };
    // In a section that has a default, no key is required.
    let has_default = !key.required && !key.optional;
    let tables = [tables, &[key.name]].concat();
    let inner = |key: Key| Key { required: key.required && !has_default, ..key };
    keys.into_iter().flat_map(|key| leaves_of(&tables, optional_table.clone(), inner(key))).collect()
}

/// A type of the value of a key.
pub trait Setting {
    /// Whether the key may be absent, as with `Option`.
    const OPTIONAL: bool = false;
    fn kind() -> ValueKind;
}

/// A struct made by [`section!`](crate::section): its keys in the order of the declaration.
pub trait Section {
    fn keys() -> Vec<Key>;
}

impl Setting for bool {
    fn kind() -> ValueKind {
        ValueKind::Bool
    }
}

impl Setting for usize {
    fn kind() -> ValueKind {
        ValueKind::Whole
    }
}

impl Setting for u64 {
    fn kind() -> ValueKind {
        ValueKind::Whole
    }
}

impl Setting for f64 {
    fn kind() -> ValueKind {
        ValueKind::Number
    }
}

impl Setting for String {
    fn kind() -> ValueKind {
        ValueKind::Text
    }
}

impl<T: Setting> Setting for Option<T> {
    const OPTIONAL: bool = true;
    fn kind() -> ValueKind {
        T::kind()
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn kind() -> ValueKind {
        ValueKind::List(Box::new(T::kind()), None)
    }
}

impl<T: Setting, const N: usize> Setting for [T; N] {
    fn kind() -> ValueKind {
        ValueKind::List(Box::new(T::kind()), Some(N))
    }
}

impl std::fmt::Display for ValueKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ValueKind::Bool => f.write_str("true or false"),
            ValueKind::Whole => f.write_str("a whole number of 0 or more"),
            ValueKind::Number => f.write_str("a number"),
            ValueKind::Text => f.write_str("a text"),
            ValueKind::Choice([only]) => write!(f, "{only}"),
            ValueKind::Choice(values) => write!(f, "one of {}", values.join(", ")),
            ValueKind::WholeOrAuto => f.write_str("auto or a whole number of 1 or more"),
            ValueKind::WordOrNumbers(words) => write!(f, "one of {}, or a list of numbers", words.join(", ")),
            ValueKind::List(of, None) => write!(f, "a list, each {of}"),
            ValueKind::List(of, Some(n)) => write!(f, "a list of {n}, each {of}"),
            ValueKind::Tables(keys) => {
                let names: Vec<_> = keys.iter().map(|key| key.name).collect();
                write!(f, "a list of tables with {}", names.join(", "))
            }
            ValueKind::Section(keys) => {
                let names: Vec<_> = keys.iter().map(|key| key.name).collect();
                write!(f, "a table with {}", names.join(", "))
            }
        }
    }
}

/// Declares an enum whose variants are written in recipes by name. The first variant is the default.
#[macro_export]
macro_rules! choice {
    ($(#[$attr:meta])* pub enum $name:ident {
        $(#[$first_attr:meta])* $first:ident = $first_text:literal
        $(, $(#[$other_attr:meta])* $other:ident = $other_text:literal)* $(,)?
    }) => {
        $(#[$attr])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(serde::Serialize, serde::Deserialize)]
        pub enum $name {
            #[default]
            $(#[$first_attr])*
            #[serde(rename = $first_text)]
            $first,
            $($(#[$other_attr])* #[serde(rename = $other_text)] $other,)*
        }

        impl $name {
            pub const ALL: &'static [Self] = &[Self::$first $(, Self::$other)*];
            pub const VALUES: &'static [&'static str] = &[$first_text $(, $other_text)*];

            pub const fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_text,
                    $(Self::$other => $other_text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                let position = Self::VALUES.iter().position(|&value| value == text);
                position
                    .map(|i| Self::ALL[i])
                    .ok_or_else(|| format!("`{text}` is not one of {}", Self::VALUES.join(", ")))
            }
        }

        impl $crate::Setting for $name {
            fn kind() -> $crate::ValueKind {
                $crate::ValueKind::Choice(Self::VALUES)
            }
        }
    };
}

/// Declares a section: each field has a doc line, a type and, unless it is required or an `Option`, a default.
/// `field as "dotted.name"` gives the key another name than the field. A field may be a section itself.
#[macro_export]
macro_rules! section {
    ($(#[$attr:meta])* pub struct $name:ident {
        $(#[doc = $doc:literal] pub $field:ident $(as $key:literal)? : $type:ty $(= $default:expr)?),* $(,)?
    }) => {
        $(#[$attr])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $(#[doc = $doc] $(#[serde(rename = $key)])? pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $crate::section!(@default $type $(, $default)?),)* }
            }
        }

        impl $crate::Setting for $name {
            fn kind() -> $crate::ValueKind {
                $crate::ValueKind::Section(<Self as $crate::Section>::keys())
            }
        }

        impl $crate::Section for $name {
            fn keys() -> Vec<$crate::Key> {
                use $crate::Setting;
                vec![$($crate::Key {
                    name: $crate::section!(@name $field $(, $key)?),
                    kind: <$type as Setting>::kind(),
                    required: $crate::section!(@required $($default)?) && !<$type as Setting>::OPTIONAL,
                    optional: <$type as Setting>::OPTIONAL,
                    doc: $doc.trim_ascii(),
                },)*]
            }
        }
    };
    (@default $type:ty) => { <$type as Default>::default() };
    (@default $type:ty, $default:expr) => { $default };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident, $key:literal) => { $key };
    (@required) => { true };
    (@required $default:expr) => { false };
}

#[cfg(test)]
mod tests {
    use super::*;

    section! {
        /// A part with an extent of its own.
        pub struct Tower {
            /// Its width.
            pub width: usize,
            /// Its layers.
            pub layers: usize = 2,
        }
    }

    section! {
        /// A model with parts.
        pub struct Seeing {
            /// Its width.
            pub width: usize,
            /// A part that may be absent.
            pub vision: Option<Tower>,
            /// A part that is there.
            pub ears: Tower = Tower { width: 3, ..Tower::default() },
        }
    }

    #[test]
    fn a_section_holds_sections() {
        let leaves = leaves(Seeing::keys());
        let names: Vec<String> = leaves.iter().map(Leaf::name).collect();
        assert_eq!(names, ["width", "vision.width", "vision.layers", "ears.width", "ears.layers"]);
        let required: Vec<bool> = leaves.iter().map(|leaf| leaf.key.required).collect();
        assert_eq!(required, [true, true, false, false, false]);
        assert_eq!(leaves[1].optional_table.as_deref(), Some("vision"));
        assert_eq!((leaves[0].optional_table.as_ref(), leaves[3].optional_table.as_ref()), (None, None));
        assert_eq!(Seeing::keys()[1].kind.to_string(), "a table with width, layers");
    }

    #[test]
    fn nested_sections_read_and_refuse_by_their_own_keys() {
        let read = |text: &str| serde_json::from_str::<Seeing>(text).map_err(|error| error.to_string());
        let seeing = read(r#"{"width": 8, "vision": {"width": 4}}"#).unwrap();
        assert_eq!(seeing.vision, Some(Tower { width: 4, layers: 2 }));
        assert_eq!((seeing.width, seeing.ears.width), (8, 3));
        assert!(read(r#"{"vision": {"depth": 4}}"#).unwrap_err().contains("unknown field `depth`"));
    }
}
