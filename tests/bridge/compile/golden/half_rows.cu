extern "C" __global__ void __launch_bounds__(128) k0_kernel(ushort* __restrict__ in0_ptr, ushort* __restrict__ in1_ptr, ushort* __restrict__ out0_ptr, int n0);
extern "C" __global__ void __launch_bounds__(128) k0_kernel(ushort* __restrict__ in0_ptr, ushort* __restrict__ in1_ptr, ushort* __restrict__ out0_ptr, int n0) {
  if (((int)threadIdx.x) < ((n0 * 38) - (((int)blockIdx.x) * 128))) {
    int row1 = (((((int)blockIdx.x) * 128) + ((int)threadIdx.x)) / 38);
    int position2 = ((((((int)blockIdx.x) * 128) + ((int)threadIdx.x)) % 38) * 8);
    int base3 = (row1 * 300);
    int base4 = 0;
    if (4 < (300 - position2)) {
      int at1 = (base3 + position2);
      int whole2 = (at1 >> 2);
      alignas(64) ushort x_ptr[4];
      *(ushort4*)(x_ptr + 0) = *(ushort4*)(in0_ptr + (whole2 * 4));
      int at3 = (base4 + position2);
      int whole4 = (at3 >> 2);
      alignas(64) ushort x_ptr_1[4];
      *(ushort4*)(x_ptr_1 + 0) = *(ushort4*)(in1_ptr + (whole4 * 4));
      alignas(64) ushort y_ptr[4];
      int at5 = ((row1 * 300) + position2);
      int whole6 = (at5 >> 2);
      #pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        alignas(64) float v1_ptr[1];
        v1_ptr[0] = bridge_from_bfloat16(x_ptr[lane]);
        alignas(64) float v2_ptr[1];
        v2_ptr[0] = bridge_from_bfloat16(x_ptr_1[lane]);
        alignas(64) float v3_ptr[1];
        v3_ptr[0] = bridge_add_bfloat16(v1_ptr[0], v2_ptr[0]);
        y_ptr[lane] = bridge_bits_bfloat16(v3_ptr[0]);
      }
      *(ushort4*)(out0_ptr + (whole6 * 4)) = *(ushort4*)(y_ptr + 0);
      int position1 = (position2 + 4);
      int at1_1 = (base3 + position1);
      int whole2_1 = (at1_1 >> 2);
      alignas(64) ushort x_ptr_2[4];
      *(ushort4*)(x_ptr_2 + 0) = *(ushort4*)(in0_ptr + (whole2_1 * 4));
      int at3_1 = (base4 + position1);
      int whole4_1 = (at3_1 >> 2);
      alignas(64) ushort x_ptr_3[4];
      *(ushort4*)(x_ptr_3 + 0) = *(ushort4*)(in1_ptr + (whole4_1 * 4));
      alignas(64) ushort y_ptr_1[4];
      int at5_1 = ((row1 * 300) + position1);
      int whole6_1 = (at5_1 >> 2);
      #pragma unroll
      for (int lane_1 = 0; lane_1 < 4; ++lane_1) {
        alignas(64) float v1_ptr_1[1];
        v1_ptr_1[0] = bridge_from_bfloat16(x_ptr_2[lane_1]);
        alignas(64) float v2_ptr_1[1];
        v2_ptr_1[0] = bridge_from_bfloat16(x_ptr_3[lane_1]);
        alignas(64) float v3_ptr_1[1];
        v3_ptr_1[0] = bridge_add_bfloat16(v1_ptr_1[0], v2_ptr_1[0]);
        y_ptr_1[lane_1] = bridge_bits_bfloat16(v3_ptr_1[0]);
      }
      *(ushort4*)(out0_ptr + (whole6_1 * 4)) = *(ushort4*)(y_ptr_1 + 0);
    } else {
      if (0 < (300 - position2)) {
        int at1_2 = (base3 + position2);
        int whole2_2 = (at1_2 >> 2);
        alignas(64) ushort x_ptr_4[4];
        *(ushort4*)(x_ptr_4 + 0) = *(ushort4*)(in0_ptr + (whole2_2 * 4));
        int at3_2 = (base4 + position2);
        int whole4_2 = (at3_2 >> 2);
        alignas(64) ushort x_ptr_5[4];
        *(ushort4*)(x_ptr_5 + 0) = *(ushort4*)(in1_ptr + (whole4_2 * 4));
        alignas(64) ushort y_ptr_2[4];
        int at5_2 = ((row1 * 300) + position2);
        int whole6_2 = (at5_2 >> 2);
        #pragma unroll
        for (int lane_2 = 0; lane_2 < 4; ++lane_2) {
          alignas(64) float v1_ptr_2[1];
          v1_ptr_2[0] = bridge_from_bfloat16(x_ptr_4[lane_2]);
          alignas(64) float v2_ptr_2[1];
          v2_ptr_2[0] = bridge_from_bfloat16(x_ptr_5[lane_2]);
          alignas(64) float v3_ptr_2[1];
          v3_ptr_2[0] = bridge_add_bfloat16(v1_ptr_2[0], v2_ptr_2[0]);
          y_ptr_2[lane_2] = bridge_bits_bfloat16(v3_ptr_2[0]);
        }
        *(ushort4*)(out0_ptr + (whole6_2 * 4)) = *(ushort4*)(y_ptr_2 + 0);
      }
      if (4 < (300 - position2)) {
        int position1_1 = (position2 + 4);
        int at1_3 = (base3 + position1_1);
        int whole2_3 = (at1_3 >> 2);
        alignas(64) ushort x_ptr_6[4];
        *(ushort4*)(x_ptr_6 + 0) = *(ushort4*)(in0_ptr + (whole2_3 * 4));
        int at3_3 = (base4 + position1_1);
        int whole4_3 = (at3_3 >> 2);
        alignas(64) ushort x_ptr_7[4];
        *(ushort4*)(x_ptr_7 + 0) = *(ushort4*)(in1_ptr + (whole4_3 * 4));
        alignas(64) ushort y_ptr_3[4];
        int at5_3 = ((row1 * 300) + position1_1);
        int whole6_3 = (at5_3 >> 2);
        #pragma unroll
        for (int lane_3 = 0; lane_3 < 4; ++lane_3) {
          alignas(64) float v1_ptr_3[1];
          v1_ptr_3[0] = bridge_from_bfloat16(x_ptr_6[lane_3]);
          alignas(64) float v2_ptr_3[1];
          v2_ptr_3[0] = bridge_from_bfloat16(x_ptr_7[lane_3]);
          alignas(64) float v3_ptr_3[1];
          v3_ptr_3[0] = bridge_add_bfloat16(v1_ptr_3[0], v2_ptr_3[0]);
          y_ptr_3[lane_3] = bridge_bits_bfloat16(v3_ptr_3[0]);
        }
        *(ushort4*)(out0_ptr + (whole6_3 * 4)) = *(ushort4*)(y_ptr_3 + 0);
      }
    }
  }
}
