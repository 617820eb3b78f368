//! What the optimiser remembers as a safetensors file, flat: `m.<weight>` and, but for matrices under Muon, `v.<weight>` in f32;
//! of moments that take a byte each, codes `m.<weight>` and `root_v.<weight>`, and the f32 scales of their blocks,
//! `m_scale.<weight>` and `root_v_scale.<weight>`.

use std::fs;
use std::path::Path;

use candle_core::Var;
use r3_kernels::adamw::bytes::{ByteMoments, Bytes};
use r3_model::export::write_safetensors;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, View};

use crate::error::{Damage, TrainError};
use crate::optimiser::Moments;

/// Its name inside a checkpoint.
pub const FILE: &str = "optimiser.safetensors";

/// Bytes [`write()`] needs, short of the header's few.
#[must_use]
pub fn bytes(moments: &[Moments]) -> u64 {
    moments.iter().flat_map(Moments::parts).map(|(_, tensor)| tensor.data_len()).sum::<usize>() as u64
}

/// Writes `moments`, those of `vars` in their order, into `dir`.
///
/// # Errors
/// If the file cannot be written.
pub fn write(dir: &Path, vars: &[(String, Var)], moments: &[Moments]) -> Result<(), TrainError> {
    let tensors = vars.iter().zip(moments).flat_map(|((name, _), one)| {
        one.parts().into_iter().map(move |(part, tensor)| (format!("{part}.{name}"), tensor))
    });
    Ok(write_safetensors(&dir.join(FILE), tensors, None)?)
}

/// Reads the moments of `vars` from `dir`, in the order of `vars` and of the kind and length of `fresh`, those of an optimiser
/// that has made no step.
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
    let all = vars.iter().zip(fresh).map(|((name, _), fresh)| (&**name, fresh));
    let known = |stored: &str| {
        stored.split_once('.').is_some_and(|(part, weight)| {
            all.clone()
                .any(|(name, fresh)| name == weight && fresh.parts().iter().any(|(own, _)| *own == part))
        })
    };
    if let Some(tensor) = file.names().into_iter().find(|name| !known(name)) {
        return Err(Damage::Surplus { tensor: tensor.to_owned() });
    }
    all.clone().map(|(name, fresh)| read_moments(&file, name, fresh)).collect()
}

fn read_moments(file: &SafeTensors<'_>, name: &str, fresh: &Moments) -> Result<Moments, Damage> {
    let numbers = |part: &str, values: &[f32]| -> Result<Vec<f32>, Damage> {
        let bytes = read_tensor(file, format!("{part}.{name}"), (Dtype::F32, values.len()))?;
        let (numbers, _) = bytes.as_chunks();
        Ok(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    };
    let bytes = |part: &str, fresh: &Bytes| -> Result<Bytes, Damage> {
        let codes = read_tensor(file, format!("{part}.{name}"), (Dtype::U8, fresh.codes.len()))?.to_vec();
        Ok(Bytes { codes, scales: numbers(&format!("{part}_scale"), &fresh.scales)? })
    };
    Ok(match fresh {
        Moments::Whole { m, v } => Moments::Whole { m: numbers("m", m)?, v: numbers("v", v)? },
        Moments::Bytes(ByteMoments { mean, root }) => {
            Moments::Bytes(ByteMoments { mean: bytes("m", mean)?, root: bytes("root_v", root)? })
        }
        Moments::Sum(m) => Moments::Sum(numbers("m", m)?),
    })
}

fn read_tensor<'a>(
    file: &SafeTensors<'a>,
    name: String,
    (dtype, len): (Dtype, usize),
) -> Result<&'a [u8], Damage> {
    let Ok(tensor) = file.tensor(&name) else { return Err(Damage::Missing { tensor: name }) };
    if tensor.dtype() != dtype || tensor.shape() != [len] {
        let found = format!("{} of shape {:?}", tensor.dtype(), tensor.shape());
        return Err(Damage::Misshapen { tensor: name, found, expected: format!("{dtype} of shape [{len}]") });
    }
    Ok(tensor.data())
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
            Moments::Whole { m: vec![1.0, -2.0], v: vec![0.5, f32::MIN_POSITIVE] },
            Moments::Whole { m: vec![3.0, 4.0, 5.0], v: vec![6.0, 7.0, 8.0] },
        ]
    }

    /// Those of AdamW.
    fn fresh(vars: &[(String, Var)]) -> Vec<Moments> {
        let zeros = |var: &Var| vec![0.0; var.elem_count()];
        vars.iter().map(|(_, var)| Moments::Whole { m: zeros(var), v: zeros(var) }).collect()
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
        muon[1] = Moments::Sum(vec![3.0, 4.0, 5.0]);
        write(dir.path(), &vars(), &muon).unwrap();
        assert_eq!(read(dir.path(), &vars(), &muon).unwrap(), muon);
        assert_eq!(bytes(&muon), 28);
        assert_eq!(refusal(read_adamw(dir.path(), &vars())), "v.a.weight is missing");
        write(dir.path(), &vars(), &moments()).unwrap();
        assert!(refusal(read(dir.path(), &vars(), &muon)).contains("v.a.weight belongs to no weight"));
    }

    #[test]
    fn moments_of_a_byte_read_back_and_are_not_taken_for_f32() {
        let dir = tempfile::tempdir().unwrap();
        let fresh: Vec<_> = [2, 3].map(|len| Moments::Bytes(ByteMoments::zeros(len))).into();
        let mut moved = fresh.clone();
        let Moments::Bytes(bytes) = &mut moved[1] else { unreachable!("made above") };
        (bytes.mean.codes, bytes.root.codes) = (vec![1, 200, 255], vec![9, 0, 3]);
        (bytes.mean.scales, bytes.root.scales) = (vec![0.5], vec![1e-9]);
        write(dir.path(), &vars(), &moved).unwrap();
        assert_eq!(read(dir.path(), &vars(), &fresh).unwrap(), moved);
        assert_eq!(super::bytes(&moved), 2 * 5 + 4 * 4);
        assert!(refusal(read_adamw(dir.path(), &vars())).contains("belongs to no weight"));
        write(dir.path(), &vars(), &moments()).unwrap();
        assert!(refusal(read(dir.path(), &vars(), &fresh)).contains("belongs to no weight"));
    }
}
