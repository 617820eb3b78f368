//! The optimiser's running means as a safetensors file: `m.<weight>` and, but for matrices under Muon, `v.<weight>`, flat f32.

use std::fs;
use std::path::Path;

use candle_core::Var;
use r3_model::export::{F32Tensor, write_safetensors};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::error::{Damage, TrainError};
use crate::optimiser::Moments;

/// Its name inside a checkpoint.
pub const FILE: &str = "optimiser.safetensors";

/// Bytes [`write()`] needs, short of the header's few.
#[must_use]
pub fn bytes(moments: &[Moments]) -> u64 {
    moments.iter().map(|one| size_of_val(&one.m[..]) + size_of_val(&one.v[..])).sum::<usize>() as u64
}

/// Writes `moments`, those of `vars` in their order, into `dir`.
///
/// # Errors
/// If the file cannot be written.
pub fn write(dir: &Path, vars: &[(String, Var)], moments: &[Moments]) -> Result<(), TrainError> {
    let tensors = vars.iter().zip(moments).flat_map(|((name, _), one)| {
        let v = (!one.v.is_empty()).then(|| (format!("v.{name}"), flat(&one.v)));
        [(format!("m.{name}"), flat(&one.m))].into_iter().chain(v)
    });
    Ok(write_safetensors(&dir.join(FILE), tensors, None)?)
}

/// Reads the moments of `vars` from `dir`, in the order of `vars` and as long as `fresh`, those of an optimiser that has
/// made no step.
///
/// # Errors
/// If the file cannot be read, is not whole, or does not hold exactly the moments of these weights; the
/// tensor is named.
pub fn read(dir: &Path, vars: &[(String, Var)], fresh: &[Moments]) -> Result<Vec<Moments>, TrainError> {
    let path = dir.join(FILE);
    let bytes = fs::read(&path).map_err(|source| TrainError::Read { path: path.clone(), source })?;
    parse(&bytes, vars, fresh).map_err(|source| TrainError::Damaged { path, source })
}

fn parse(bytes: &[u8], vars: &[(String, Var)], fresh: &[Moments]) -> Result<Vec<Moments>, Damage> {
    let file = SafeTensors::deserialize(bytes)?;
    let lengths = vars.iter().zip(fresh).map(|((name, _), fresh)| (&**name, fresh.lengths()));
    let known = |stored: &str| match stored.split_once('.') {
        Some(("m", name)) => lengths.clone().any(|(var, _)| var == name),
        Some(("v", name)) => lengths.clone().any(|(var, [_, v])| var == name && v > 0),
        _ => false,
    };
    if let Some(tensor) = file.names().into_iter().find(|name| !known(name)) {
        return Err(Damage::Surplus { tensor: tensor.to_owned() });
    }
    let read = |prefix, name: &str, len| read_tensor(&file, format!("{prefix}.{name}"), len);
    let moments = lengths.clone().map(|(name, [m, v])| {
        let m = read("m", name, m)?;
        Ok(Moments { m, v: if v > 0 { read("v", name, v)? } else { Vec::new() } })
    });
    moments.collect()
}

fn flat(values: &[f32]) -> F32Tensor<'_> {
    F32Tensor { shape: vec![values.len()], values }
}

fn read_tensor(file: &SafeTensors<'_>, name: String, expected: usize) -> Result<Vec<f32>, Damage> {
    let Ok(tensor) = file.tensor(&name) else { return Err(Damage::Missing { tensor: name }) };
    if tensor.dtype() != Dtype::F32 || tensor.shape() != [expected] {
        let found = format!("{} of shape {:?}", tensor.dtype(), tensor.shape());
        return Err(Damage::Misshapen { tensor: name, found, expected });
    }
    let values =
        tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes")));
    Ok(values.collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn vars() -> Vec<(String, Var)> {
        let var = |len: usize| Var::new(vec![0.0_f32; len], &Device::Cpu).unwrap();
        vec![("b.weight".into(), var(2)), ("a.weight".into(), var(3))]
    }

    fn moments() -> Vec<Moments> {
        vec![
            Moments { m: vec![1.0, -2.0], v: vec![0.5, f32::MIN_POSITIVE] },
            Moments { m: vec![3.0, 4.0, 5.0], v: vec![6.0, 7.0, 8.0] },
        ]
    }

    /// Those of AdamW.
    fn fresh(vars: &[(String, Var)]) -> Vec<Moments> {
        let zeros = |var: &Var| vec![0.0; var.elem_count()];
        vars.iter().map(|(_, var)| Moments { m: zeros(var), v: zeros(var) }).collect()
    }

    fn read_adamw(dir: &Path, vars: &[(String, Var)]) -> Result<Vec<Moments>, TrainError> {
        read(dir, vars, &fresh(vars))
    }

    fn refusal(result: Result<Vec<Moments>, TrainError>) -> String {
        match result.unwrap_err() {
            TrainError::Damaged { path, source } => {
                assert!(path.ends_with(FILE));
                source.to_string()
            }
            other => panic!("{other} does not say what is damaged"),
        }
    }

    #[test]
    fn moments_read_back_bit_for_bit_in_the_order_of_the_weights() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &vars(), &moments()).unwrap();
        assert_eq!(read_adamw(dir.path(), &vars()).unwrap(), moments());
        assert_eq!(bytes(&moments()), 40);
    }

    #[test]
    fn a_truncated_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &vars(), &moments()).unwrap();
        let whole = fs::read(dir.path().join(FILE)).unwrap();
        for len in [0, 4, whole.len() / 2, whole.len() - 1] {
            fs::write(dir.path().join(FILE), &whole[..len]).unwrap();
            assert_eq!(refusal(read_adamw(dir.path(), &vars())), "it is not a whole safetensors file");
        }
    }

    #[test]
    fn moments_of_another_model_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let var = |len: usize| Var::new(vec![0.0_f32; len], &Device::Cpu).unwrap();
        write(dir.path(), &vars(), &moments()).unwrap();
        let fewer = vec![vars().remove(0)];
        assert!(refusal(read_adamw(dir.path(), &fewer)).contains("a.weight belongs to no weight"));
        let mut more = vars();
        more.push(("c.weight".into(), var(1)));
        assert_eq!(refusal(read_adamw(dir.path(), &more)), "m.c.weight is missing");
        let wider = vec![vars().remove(0), ("a.weight".into(), var(4))];
        assert!(refusal(read_adamw(dir.path(), &wider)).starts_with("m.a.weight is F32 of shape [3]"));
    }

    #[test]
    fn a_matrix_under_muon_has_one_mean_and_is_not_taken_for_another_optimisers() {
        let (dir, mut muon) = (tempfile::tempdir().unwrap(), moments());
        muon[1].v.clear();
        write(dir.path(), &vars(), &muon).unwrap();
        assert_eq!(read(dir.path(), &vars(), &muon).unwrap(), muon);
        assert_eq!(bytes(&muon), 28);
        assert_eq!(refusal(read_adamw(dir.path(), &vars())), "v.a.weight is missing");
        write(dir.path(), &vars(), &moments()).unwrap();
        assert!(refusal(read(dir.path(), &vars(), &muon)).contains("v.a.weight belongs to no weight"));
    }
}
