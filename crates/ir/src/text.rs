//! The text form of a graph. It prints, parses, and equal text means an equal graph.
//!
//! ```text
//! slot $0 layers.0.wq f32[8,8] weight normal(0.02)
//! slot $1 layers.0.wk f32[4,8] weight normal(0.02) part=$2+64
//! %0 = read{slot=$0} -> f32[8,8] @layers.0.wq #1f
//! %3 = rms_norm{eps=0.000001, center=false, weight=none, bias=false, residual=true} %1 %2 -> f32[4,8] f32[4,8] @layers.0 #2a
//! write $4 %3.1
//! result loss %7
//! ```

use std::fmt;
use std::str::FromStr;

use crate::attr::{Attr, AttrMap};
use crate::graph::{Class, Graph, Init, Node, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;
use crate::types::{DType, TensorType};

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.out {
            0 => write!(f, "%{}", self.node.0),
            out => write!(f, "%{}.{out}", self.node.0),
        }
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, s) in self.slots.iter().enumerate() {
            write!(f, "slot ${i} {} {} {} {}", s.path, s.ty, s.class.to_text(), s.init.to_text())?;
            match s.part {
                Some(SlotPart { of, offset }) => writeln!(f, " part=${}+{offset}", of.0)?,
                None => writeln!(f)?,
            }
        }
        for (i, node) in self.nodes.iter().enumerate() {
            let attrs: Vec<String> = node.op.attrs().into_iter().map(|(n, v)| format!("{n}={v}")).collect();
            write!(f, "%{i} = {}{{{}}}", node.op.name(), attrs.join(", "))?;
            node.ins.iter().try_for_each(|v| write!(f, " {v}"))?;
            write!(f, " ->")?;
            node.outs.iter().try_for_each(|t| write!(f, " {t}"))?;
            writeln!(f, " @{} #{:x}", node.path, node.key)?;
        }
        for (slot, v) in &self.writes {
            writeln!(f, "write ${} {v}", slot.0)?;
        }
        for (name, v) in &self.results {
            writeln!(f, "result {name} {v}")?;
        }
        Ok(())
    }
}

impl FromStr for Graph {
    type Err = String;

    fn from_str(text: &str) -> Result<Graph, String> {
        let mut graph = Graph::default();
        for (line, statement) in statements(text) {
            parse_statement(&mut graph, statement).map_err(|why| format!("line {line}: {why}"))?;
        }
        Ok(graph)
    }
}

/// Statements, each with the number of its first line. A statement continues while a brace is open.
fn statements(text: &str) -> Vec<(usize, &str)> {
    let (mut found, mut start, mut depth, mut line, mut first) = (vec![], 0, 0, 1, 1);
    for (i, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            '\n' => {
                line += 1;
                if depth == 0 {
                    found.push((first, text[start..i].trim()));
                    (start, first) = (i + 1, line);
                }
            }
            _ => {}
        }
    }
    found.push((first, text[start..].trim()));
    found.retain(|(_, s)| !s.is_empty() && !s.starts_with("//"));
    found
}

fn parse_statement(graph: &mut Graph, statement: &str) -> Result<(), String> {
    if statement.starts_with('%') {
        return parse_node(graph, statement);
    }
    let words: Vec<&str> = statement.split_whitespace().collect();
    match words[..] {
        ["slot", id, path, ty, class, init, ref rest @ ..] => {
            if SlotId::read(id)? != SlotId(graph.slots.len() as u32) {
                return Err(format!("slot {id} is out of order"));
            }
            let part = match rest {
                [] => None,
                [part] => Some(parse_part(part)?),
                _ => return Err(format!("`{}` after a slot", rest.join(" "))),
            };
            let (class, init) = (Class::read(class)?, Init::read(init)?);
            graph.slots.push(Slot { path: path.into(), ty: parse_type(ty)?, class, init, part });
        }
        ["write", slot, value] => {
            let (slot, value) = (SlotId::read(slot)?, parse_value(value)?);
            if slot.0 as usize >= graph.slots.len() {
                return Err(format!("${} is written before its slot stands", slot.0));
            }
            made(graph, value)?;
            graph.writes.push((slot, value));
        }
        ["result", name, value] => {
            let value = parse_value(value)?;
            made(graph, value)?;
            graph.results.push((name.into(), value));
        }
        _ => return Err(format!("`{statement}` is no statement")),
    }
    Ok(())
}

/// Checks that a value is an output of a node already read.
fn made(graph: &Graph, v: Value) -> Result<(), String> {
    match graph.nodes.get(v.node.0 as usize) {
        Some(node) if (v.out as usize) < node.outs.len() => Ok(()),
        _ => Err(format!("{v} is used before it is made")),
    }
}

fn parse_part(text: &str) -> Result<SlotPart, String> {
    let (of, offset) =
        text.strip_prefix("part=").and_then(|t| t.split_once('+')).ok_or("a part is part=$N+offset")?;
    Ok(SlotPart { of: SlotId::read(of)?, offset: usize::read(offset)? })
}

fn parse_node(graph: &mut Graph, statement: &str) -> Result<(), String> {
    let open = statement.find('{').ok_or("a node has its attributes in braces")?;
    let close = statement.rfind('}').filter(|&close| close > open).ok_or("a bracket is not closed")?;
    let (id, name) = statement[..open].split_once('=').ok_or("a node is `%N = operation{..}`")?;
    if parse_value(id.trim())?.node != NodeId(graph.nodes.len() as u32) {
        return Err(format!("node {} is out of order", id.trim()));
    }
    let mut attrs = AttrMap(attributes(&statement[open + 1..close])?);
    let op = Op::parse(name.trim(), &mut attrs)?;
    if let Some((extra, _)) = attrs.0.first() {
        return Err(format!("{} has no attribute `{extra}`", op.name()));
    }
    let (mut ins, mut outs, mut path, mut key) = (vec![], vec![], None, None);
    for word in statement[close + 1..].split_whitespace() {
        match word.chars().next() {
            Some('%') => ins.push(parse_value(word)?),
            Some('@') => path = Some(word[1..].to_string()),
            Some('#') => {
                key = Some(u64::from_str_radix(&word[1..], 16).map_err(|_| format!("`{word}` is no key"))?)
            }
            _ if word == "->" => {}
            _ => outs.push(parse_type(word)?),
        }
    }
    ins.iter().try_for_each(|v| made(graph, *v))?;
    if let Op::Read { slot } = op
        && slot.0 as usize >= graph.slots.len()
    {
        return Err(format!("${} is read before its slot stands", slot.0));
    }
    let inferred = op.infer(graph, &ins)?;
    if inferred != outs {
        let wanted: Vec<String> = inferred.iter().map(TensorType::to_string).collect();
        return Err(format!("{} gives {}", op.name(), wanted.join(" ")));
    }
    let (path, key) = (path.ok_or("a node has a path")?, key.ok_or("a node has a key")?);
    graph.next_key = graph.next_key.max(key.saturating_add(1));
    graph.nodes.push(Node { op, ins, outs, path, key });
    Ok(())
}

/// `name=value` pairs separated by commas outside all brackets.
fn attributes(text: &str) -> Result<Vec<(&str, &str)>, String> {
    let (mut pairs, mut depth, mut start) = (vec![], 0, 0);
    for (i, c) in text.char_indices().chain([(text.len(), ',')]) {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                let pair = text[start..i].trim();
                start = i + 1;
                if !pair.is_empty() {
                    pairs.push(pair.split_once('=').ok_or_else(|| format!("`{pair}` is no attribute"))?);
                }
            }
            _ => {}
        }
    }
    if depth != 0 {
        return Err("a bracket is not closed".into());
    }
    Ok(pairs)
}

fn parse_value(text: &str) -> Result<Value, String> {
    let number = text.strip_prefix('%').ok_or_else(|| format!("`{text}` is no value"))?;
    let (node, out) = number.split_once('.').unwrap_or((number, "0"));
    Ok(NodeId(u32::read(node)?).out(u8::read(out)?))
}

fn parse_type(text: &str) -> Result<TensorType, String> {
    let (dtype, dims) = text.split_once('[').ok_or_else(|| format!("`{text}` is no type"))?;
    let dims = dims.strip_suffix(']').ok_or_else(|| format!("`{text}` is no type"))?;
    let dims = dims.split(',').filter(|d| !d.is_empty()).map(usize::read).collect::<Result<Vec<_>, _>>()?;
    Ok(TensorType::new(DType::read(dtype)?, dims))
}
